"""A whole run over TLS: what it tells of its rounds; its secrets are in one file each and nowhere else."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from jaxrl_sync.launch import sweep
from jaxrl_sync.launch.environment import RUN_MARK
from jaxrl_sync.launch.status import Looker, describe
from jaxrl_sync.report.page import write_report
from jaxrl_sync.transfer import tls
from jaxrl_sync.transfer.hub.trace import PHASES, SIZED
from tests.app.runs import SMALL, Run, check_flow

pytestmark = [pytest.mark.e2e, pytest.mark.slow]


def holders(secrets: list[bytes], run: Run) -> list[str]:
    """Command lines, environments and files of a run that hold a secret."""
    found = []
    for pid in sweep.marked_pids(RUN_MARK, str(run.run_dir)):
        for name in ("cmdline", "environ"):
            try:
                text = Path(f"/proc/{pid}/{name}").read_bytes()
            except OSError:  # it has just ended
                continue
            found += [f"{name} of {pid}" for secret in secrets if secret in text]
    for path in (p for p in run.run_dir.rglob("*") if p.is_file()):
        try:
            text = path.read_bytes()
        except FileNotFoundError:  # it has just got its final name
            continue
        found += [str(path.relative_to(run.run_dir)) for secret in secrets if secret in text]
    return found


@pytest.mark.timeout(600)
def test_a_run_over_tls_keeps_its_secrets_and_tells_its_rounds(tmp_path: Path) -> None:
    options = ("--run.steps=60", "--hub.tls=self-signed")  # both engines are up before they are over
    with Run(tmp_path / "run", *SMALL, *options) as run:
        run.wait_up("engine-0", "engine-1")
        run.wait_step(2)
        token = (run.run_dir / "token").read_bytes().strip()
        key = (run.run_dir / "tls" / "key.pem").read_bytes().splitlines()[1]
        assert len(token) == 64 and len(key) > 40
        assert sorted(holders([token, key], run)) == ["tls/key.pem", "token"]
        (pids, urls) = zip(
            *(
                (row["pid"], row["url"])
                for name in ("hub", "engine-0", "engine-1")
                if (row := run.json(f"proc/{name}.json")) is not None
            ),
            strict=True,
        )
        assert len(set(pids)) == 3 and all(url.startswith("https://") for url in urls)
        assert urls[0].endswith(tls.of_run(run.run_dir).fingerprint)
        with Looker(None, urls[0], run.run_dir / "token") as looker:
            shown = describe(looker.look())
        assert "engine engine-0" in shown and "publisher trainer" in shown
        code, out, err = run.finish(timeout_s=400)
        assert code == 0, err
        check_flow(run.json("summary.json") or {})
        assert sorted(holders([token, key], run)) == ["tls/key.pem", "token"]
        assert token.decode() not in out + err + shown
        rows = [json.loads(line) for line in (run.run_dir / "metrics.jsonl").read_text().splitlines()]
        rounds = [row for row in rows if row["kind"] == "round" and row["state"] == "committed"]
        assert {row["engine"] for row in rounds} == {"engine-0", "engine-1"}
        edges = [row for row in rows if row["kind"] == "edge"]
        assert len(edges) >= len(rounds)
        for row in edges:
            assert {f"seconds_{p}" for p in PHASES} | {f"bytes_{p}" for p in SIZED} <= row.keys()
            assert row["seconds_wire"] > 0 and row["bytes_wire"] > 0 and row["seconds_commit"] > 0
        spans = [json.loads(line) for line in (run.run_dir / "timeline" / "orchestrator.jsonl").open()]
        drawn = [row for row in spans if row["kind"] == "round"]
        assert drawn and all(row["t0"] <= row["t1"] and row["source"] for row in drawn)
        assert 'alt="Rounds"' in write_report(run.run_dir).read_text()
