"""``jaxrl-sync engine CONFIG`` from the command line: serves without a hub, refuses without the token."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest

from jaxrl_sync.cli import main
from tests.app.runs import ADDITION, CACHE

SIZES = ["--engine.devices", "1", "--engine.slots", "4"]


@pytest.mark.slow
def test_random_weights_are_served_behind_the_token_until_sigterm(tmp_path: Path) -> None:
    token_file = tmp_path / "token"
    words = ["engine", str(ADDITION), "--random-weights", "--token-file", str(token_file), *SIZES]
    env = {**os.environ, "JAX_COMPILATION_CACHE_DIR": str(CACHE)}
    server = subprocess.Popen(
        [sys.executable, "-m", "jaxrl_sync.cli", *words], stdout=subprocess.PIPE, text=True, env=env
    )
    try:
        assert server.stdout is not None
        line = server.stdout.readline()
        assert line.startswith("serving on http://127.0.0.1:") and str(token_file) in line
        url = line.split()[2].rstrip(",")
        assert token_file.stat().st_mode & 0o777 == 0o600
        headers = {"Authorization": f"Bearer {token_file.read_text().strip()}"}
        body = {"model": "policy", "prompt": "1+2=", "max_tokens": 3}
        assert httpx.post(f"{url}/v1/completions", json=body, timeout=60).status_code == 401
        answer = httpx.post(f"{url}/v1/completions", json=body, headers=headers, timeout=60)
        assert answer.status_code == 200, answer.text
        assert answer.json()["usage"]["prompt_tokens"] >= 4
        begin = time.monotonic()
        server.send_signal(signal.SIGSTOP)  # so that both are there when it looks: as from timeout(1)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGCONT):
            server.send_signal(number)
        assert server.wait(timeout=60) == 0
        assert time.monotonic() - begin < 30
    finally:
        server.kill()
        server.communicate()


BAD = [
    ([], 2, "needs the weights to serve: --checkpoint DIR or --random-weights"),
    (["--checkpoint", "/no/such/folder"], 3, "--checkpoint /no/such/folder: no such folder"),
    (["--random-weights", "--engine.processes", "2", "--engine.devices", "1"], 2, "is one process"),
    (["--random-weights", "--checkpoint", "x"], 2, "not allowed with argument"),
]


@pytest.mark.parametrize(("words", "code", "message"), BAD, ids=[" ".join(row[0]) or "none" for row in BAD])
def test_what_cannot_be_served_is_one_line(
    words: list[str], code: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["engine", str(ADDITION), *words]) == code
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and message in err
