"""What a machine can lack: each is one clear error that says what to do, and importing never fails."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from jaxrl_sync.cli import main
from jaxrl_sync.transfer.verbs.devices import Choice, Gid, Port, choose, scan
from jaxrl_sync.transfer.verbs.errors import VerbsError
from jaxrl_sync.transfer.verbs.native import backend, is_built, native
from tests.verbs.fakelib import Fake

ROOT = Path(__file__).parents[2]
GOOD = Gid(1, bytes(10) + b"\xff\xff" + bytes([10, 77, 0, 1]), "RoCE v2", "eth0")


def run(code: str, **environment: str) -> str:
    """Standard output of Python code in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join([os.environ.get("PYTHONPATH", ""), str(ROOT)]),
            **environment,
        },
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_no_libibverbs() -> None:
    code = "from jaxrl_sync.cli import main\nimport sys\nsys.exit(0 if main(['verbs']) == 3 else 1)"
    out = run(code, JAXRL_SYNC_IBVERBS="/nowhere/libibverbs.so.1")
    assert "libibverbs can't be loaded (/nowhere/libibverbs.so.1: cannot open" in out
    assert "install it (Debian: libibverbs1 ibverbs-providers) or choose another transport" in out


def test_extension_not_built(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jaxrl_sync.transfer._verbs", None)
    assert not is_built()
    with pytest.raises(VerbsError, match="was not built .*reinstall with a C compiler or use shm or tcp"):
        native()


def test_no_pyverbs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyverbs", None)
    monkeypatch.delitem(sys.modules, "jaxrl_sync.transfer.verbs.with_pyverbs", raising=False)
    with pytest.raises(
        VerbsError, match="pyverbs can't be imported .*python3-pyverbs .*jaxrl-sync.pyverbs.*'native'"
    ):
        backend("pyverbs")
    with pytest.raises(VerbsError, match="verbs backend 'fast', expected native or pyverbs"):
        backend("fast")


def test_builds_without_headers(tmp_path: Path) -> None:
    """No <infiniband/...> is included: what is built is the same with and without rdma-core's headers."""
    sources = sorted((ROOT / "cext" / "verbs").glob("*.[ch]"))
    assert sources and not [s.name for s in sources if "#include <infiniband" in s.read_text()]


def test_no_devices_and_no_kernel_modules(tmp_path: Path) -> None:
    with pytest.raises(
        VerbsError, match="the kernel lists no RDMA device: load its driver, or use shm or tcp"
    ):
        choose(scan(tmp_path / "sys"))


def test_port_down_and_empty_table_of_gids() -> None:
    down = Port("mlx5_0", 1, "DOWN", "Ethernet", 100.0, 0, -1, (GOOD,))
    with pytest.raises(
        VerbsError, match="mlx5_0:1: DOWN, expected ACTIVE: check cable and switch, or `ip link`"
    ):
        choose([down])
    empty = Port("mlx5_1", 1, "ACTIVE", "Ethernet", 100.0, 0, -1, ())
    with pytest.raises(
        VerbsError, match="mlx5_1:1 has no usable GID .the table is empty.; give its interface"
    ):
        choose([empty])
    assert (
        choose([down, empty, Port("mlx5_2", 1, "ACTIVE", "Ethernet", 100.0, 0, -1, (GOOD,))]).port.device
        == "mlx5_2"
    )
    with pytest.raises(VerbsError, match="mlx5_0:1: not among mlx5_9"):
        choose([down], Choice(include=("mlx5_9",)))


def test_memlock_too_low(fake: Fake) -> None:
    code = (
        "import os, resource; resource.setrlimit(resource.RLIMIT_MEMLOCK, (65536, 65536))\n"
        "from tests.verbs.fakelib import Fake\n"
        "Fake(os.environ['JAXRL_SYNC_IBVERBS']).knobs.register_limit = 65536\n"
        "from jaxrl_sync.transfer import _verbs\n"
        "with _verbs.Context('fake0') as context:\n"
        "  try: _verbs.MemoryRegion(context, bytearray(1 << 20))\n"
        "  except OSError as error: print(error)"
    )
    out = run(code)
    assert "registering 1048576 bytes, but only 65536 may be locked" in out
    assert "`ulimit -l unlimited`, LimitMEMLOCK, or the container's memlock limit" in out


def test_command_line_warns_of_a_low_memlock_limit(
    fake_path: str, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["verbs"])
    soft = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    wanted = "unlimited" if soft == resource.RLIM_INFINITY else f"{soft} bytes: registering more fails"
    assert f"memlock    {wanted}" in capsys.readouterr().out


def test_importing_never_fails_whatever_is_missing() -> None:
    code = (
        "import sys; sys.modules['jaxrl_sync.transfer._verbs'] = None; import {}; print('jax' in sys.modules)"
    )
    names = [
        "jaxrl_sync.transfer.verbs.devices",
        "jaxrl_sync.transfer.verbs.endpoint",
        "jaxrl_sync.transfer.verbs.cli",
        "jaxrl_sync.transfer.bench.cli",
    ]
    for name in names:
        assert run(code.format(name), JAXRL_SYNC_IBVERBS="/nowhere").strip() == "False", name
