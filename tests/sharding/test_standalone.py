"""As another project uses it: only jax and numpy come along, and the examples of the docs run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

USE = """
import sys
import jax, jax.numpy as jnp, numpy as np
before = {m.partition(".")[0] for m in sys.modules}
before |= {"scipy", "opt_einsum", "ml_dtypes", "jaxlib"}  # what jax itself imports on first use
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from jaxrl_sync.sharding import Layout, plan, reshard, trace
devices = np.array(jax.devices())
on, to = Mesh(devices[:4], ("x",)), Mesh(devices[4:6], ("y",))
params = {"w": jax.device_put(jnp.arange(32.0).reshape(4, 8), NamedSharding(on, P("x")))}
target = {"w": jax.ShapeDtypeStruct((8, 4), jnp.bfloat16, sharding=NamedSharding(to, P("y")))}
corr = trace(lambda t: {"w": t["w"].T.astype(jnp.bfloat16)}, params, target)
out = reshard(params, plan(corr.export_layout, Layout.of(target), corr))
assert (np.asarray(out["w"], np.float32) == np.arange(32.0).reshape(4, 8).T).all()
rooms = {m for m in sys.modules if m.startswith("jaxrl_sync.") and not m.startswith("jaxrl_sync.sharding")}
assert not rooms, rooms
standard = set(sys.stdlib_module_names)
new = {m.partition(".")[0] for m in sys.modules} - before - standard - {"jaxrl_sync"}
assert not new, new
print("alone")
"""


def _run(*words: str) -> str:
    env = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=8", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run([sys.executable, *words], env=env, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def test_the_mapper_brings_nothing_but_jax_and_numpy() -> None:
    assert _run("-c", USE).strip() == "alone"


EXAMPLE = """
import runpy, sys
import jax, numpy, optax, flax.linen, flax.nnx
jax.numpy.ones(3).sum().block_until_ready()
before = {m.partition(".")[0] for m in sys.modules} | {"scipy", "opt_einsum", "ml_dtypes", "jaxlib"}
runpy.run_path(sys.argv[1], run_name="__main__")
rooms = {m for m in sys.modules if m.startswith("jaxrl_sync.") and not m.startswith("jaxrl_sync.sharding")}
assert not rooms, rooms
new = {m.partition(".")[0] for m in sys.modules} - before - set(sys.stdlib_module_names) - {"jaxrl_sync"}
assert not new, new
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", ["linen_to_engine", "nnx_trainer"])
def test_examples_of_the_docs_run_and_bring_no_other_room_nor_package(name: str) -> None:
    out = _run("-c", EXAMPLE, str(ROOT / "docs" / "examples" / f"{name}.py"))
    assert "every bit as converted" in out


def test_importing_the_package_imports_neither_jax_nor_its_own_modules() -> None:
    code = "import sys, jaxrl_sync.sharding; assert 'jax' not in sys.modules, 'jax came along'"
    _run("-c", code)


def test_without_the_extension_everything_works_and_says_so_once() -> None:
    code = (
        "import sys; sys.modules['jaxrl_sync.sharding._kernels'] = None\n"
        "import logging; logging.basicConfig(stream=sys.stdout)\n" + USE
    )
    out = _run("-c", code)
    assert out.count("no C kernels, numpy does the copies") == 1
    assert out.strip().endswith("alone")


def test_the_tutorial_runs_as_printed() -> None:
    import re

    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "mapper.md").read_text(), re.DOTALL)
    assert len(blocks) == 6
    out = _run("-c", "\n".join(blocks) + "\nassert weights['layer2'].sharding == target['layer2'].sharding")
    assert "layer0 bfloat16[16x2x32]: cast from gate -> bfloat16; up -> bfloat16" in out


@pytest.mark.slow
@pytest.mark.parametrize("compiler", ["false", None])
def test_the_extension_builds_clean_and_is_optional(compiler: str | None, tmp_path: Path) -> None:
    words = [
        "setup.py",
        "-q",
        "build_ext",
        "--build-lib",
        str(tmp_path / "lib"),
        "--build-temp",
        str(tmp_path),
    ]
    env = {**os.environ, "CC": compiler or os.environ.get("CC", "cc")}
    done = subprocess.run(
        [sys.executable, *words], env=env, cwd=ROOT, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr[-2000:]  # also without a compiler
    built = list((tmp_path / "lib").rglob("_kernels*.so"))
    if compiler is None and built:
        assert "warning: " not in done.stderr.replace("SetuptoolsWarning", "")
    if compiler == "false":
        assert not built and "_kernels" in done.stderr
