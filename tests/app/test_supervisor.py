"""The supervisor with real processes: deaths, restarts, deadlines, signals; that nothing is left behind."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from jaxrl_sync.launch import supervisor, sweep
from jaxrl_sync.launch.environment import RUN_MARK
from jaxrl_sync.launch.supervisor import Outcome, Supervisor
from jaxrl_sync.launch.worker import Worker, WorkerSpec, error_line
from tests.app.children import WAIT, Notes, alive, run_of, settings, worker

DONE = "announce()\nprogress(1)\ntime.sleep(0.3)\nsys.exit(0)\n"
DONE_AFTER_ENGINE = "while not (run / 'proc' / 'engine-0.json').exists():\n    time.sleep(0.02)\n" + DONE


def supervise(run_dir: Path, specs: list[WorkerSpec], shm_prefix: str = "", **changes: object) -> Outcome:
    outcome = Supervisor(settings(**changes), run_dir, specs, Notes(), shm_prefix).run()
    assert sweep.marked_pids(RUN_MARK, str(run_dir)) == []
    return outcome


def when_up(run_dir: Path, action: Callable[[], object]) -> None:
    """Call ``action`` in a thread of its own once all four processes are up and have their handlers, and the
    supervisor has noted that it started them."""

    def up() -> bool:
        noted = run_dir / "events.jsonl"
        starts = noted.read_text().count('"start"') if noted.exists() else 0
        return starts == 4 and len(list((run_dir / "proc").glob("*.json"))) == 4

    def wait() -> None:
        if _eventually(up):
            action()

    threading.Thread(target=wait, daemon=True).start()


def _eventually(there: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + 60
    while not there() and time.monotonic() < deadline:
        time.sleep(0.02)
    return there()


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def events(run_dir: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (run_dir / "events.jsonl").read_text().splitlines()]


def test_the_error_line_of_a_process_is_its_own_last_word_and_not_a_librarys() -> None:
    said = (
        "starts\njaxrl-sync: error: first\njaxrl-sync: error: why\nE0000 manager.cc:159] Failed to cancel\n\n"
    )
    assert error_line(said) == "jaxrl-sync: error: why"
    assert error_line("Traceback\nKeyError: 3\n") == "KeyError: 3" and error_line("\n") == ""


def test_a_run_ends_well_when_the_orchestrator_is_done(tmp_path: Path) -> None:
    assert supervise(tmp_path, run_of(tmp_path, orchestrator=DONE)) == Outcome(0)
    assert [e["process"] for e in events(tmp_path) if e["event"] == "start"] == [
        "hub",
        "trainer-0",
        "engine-0",
        "orchestrator",
    ]


def test_trainer_death_ends_the_run_with_its_name(tmp_path: Path) -> None:
    trainer = "announce()\ntime.sleep(0.5)\nos.kill(os.getpid(), signal.SIGKILL)\n"
    outcome = supervise(tmp_path, run_of(tmp_path, trainer=trainer))
    assert outcome.code == 4
    assert outcome.cause.startswith("trainer-0 was killed by SIGKILL; its log is ")


def test_the_cause_is_the_one_that_died_first_not_the_orchestrator_that_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "SETTLE_S", 60.0)  # it ends as soon as the death is seen
    trainer = "announce()\nwhile not (run / 'noticed').exists():\n    time.sleep(0.02)\n"
    trainer += "time.sleep(0.1)\nos.kill(os.getpid(), signal.SIGKILL)\n"
    notices = "announce()\nwhile not (run / 'proc' / 'trainer-0.json').exists():\n    time.sleep(0.02)\n"
    notices += "(run / 'noticed').touch()\n"
    notices += "print('jaxrl-sync: error: no answer', flush=True)\nsys.exit(4)\n"
    outcome = supervise(tmp_path, run_of(tmp_path, trainer=trainer, orchestrator=notices))
    assert (outcome.code, outcome.cause.split(" was ")[0]) == (4, "trainer-0")


def test_orchestrator_failure_passes_on_its_code_and_line(tmp_path: Path) -> None:
    fails = (
        "announce()\nprint('Traceback')\nprint('jaxrl-sync: error: task addition raised: 7')\nsys.exit(1)\n"
    )
    outcome = supervise(tmp_path, run_of(tmp_path, orchestrator=fails))
    assert outcome == Outcome(1, "orchestrator: task addition raised: 7")


def test_orchestrator_killed_ends_the_run(tmp_path: Path) -> None:
    dies = "announce()\nos.kill(os.getpid(), signal.SIGKILL)\n"
    outcome = supervise(tmp_path, run_of(tmp_path, orchestrator=dies))
    assert outcome.code == 4
    assert "orchestrator was killed by SIGKILL" in outcome.cause


def test_engine_is_restarted_and_the_run_goes_on(tmp_path: Path) -> None:
    engine = "announce()\nif starts() < 3:\n    os.kill(os.getpid(), signal.SIGKILL)\nstop.wait()\n"
    ends = "announce()\nwhile not (run / 'engine-0.starts').exists() or "
    ends += "(run / 'engine-0.starts').read_text() != '3':\n    time.sleep(0.05)\n"
    assert supervise(tmp_path, run_of(tmp_path, engine=engine, orchestrator=ends)) == Outcome(0)
    restarts = [e["detail"] for e in events(tmp_path) if e["event"] == "restart"]
    assert len(restarts) == 2
    assert str(restarts[1]).endswith("restarted (2 of 3)")


def test_engine_that_keeps_dying_ends_the_run(tmp_path: Path) -> None:
    outcome = supervise(tmp_path, run_of(tmp_path, engine="starts()\nsys.exit(9)\n"), engine_restarts=2)
    assert outcome.code == 4
    assert "engine-0 exited with code 9" in outcome.cause and "(after 2 restarts)" in outcome.cause
    assert (tmp_path / "engine-0.starts").read_text() == "3"


def test_engine_with_a_bad_config_is_not_restarted(tmp_path: Path) -> None:
    engine = "starts()\nprint('jaxrl-sync: error: engine.slots: expected >= 1', flush=True)\nsys.exit(2)\n"
    outcome = supervise(tmp_path, run_of(tmp_path, engine=engine))
    assert outcome == Outcome(2, "engine-0: engine.slots: expected >= 1")
    assert (tmp_path / "engine-0.starts").read_text() == "1"


def test_hub_is_restarted_on_its_port(tmp_path: Path) -> None:
    hub = "open(run / 'hub.argv', 'a').write(' '.join(sys.argv[1:]) + '\\n')\n"
    hub += "announce(url='http://127.0.0.1:4711')\n"
    hub += "if starts() < 2:\n    time.sleep(0.5)\n    os.kill(os.getpid(), signal.SIGKILL)\nstop.wait()\n"
    ends = "announce()\nwhile (run / 'hub.starts').read_text() != '2':\n    time.sleep(0.05)\n"
    assert supervise(tmp_path, run_of(tmp_path, hub=hub, orchestrator=ends)) == Outcome(0)
    assert (tmp_path / "hub.argv").read_text().splitlines() == ["", "--port 4711"]


def test_a_worker_of_two_ranks_dies_as_one_unit_and_gets_a_new_coordinator(tmp_path: Path) -> None:
    tells = "open(run / f'{name}.argv', 'a').write(' '.join(sys.argv[1:]) + '\\n')\nannounce()\n"
    rank0 = tells + "starts()\nstop.wait()\n"
    rank1 = tells + "both = run / 'engine-0.starts'\nwhile not both.exists():\n    time.sleep(0.02)\n"
    rank1 += "if starts() < 2:\n    os.kill(os.getpid(), signal.SIGKILL)\nstop.wait()\n"
    ends = "announce()\nfiles = [run / 'engine-0.starts', run / 'engine-0.1.starts']\n"
    ends += "while not all(f.exists() and f.read_text() == '2' for f in files):\n    time.sleep(0.05)\n"
    specs = run_of(tmp_path, orchestrator=ends)
    specs[2] = worker("engine", tmp_path, rank0, rank1, name="engine-0")
    assert supervise(tmp_path, specs) == Outcome(0)
    first, second = (tmp_path / "engine-0.argv").read_text().split("\n")[:2]
    assert first.startswith("--coordinator 127.0.0.1:") and second.startswith("--coordinator 127.0.0.1:")
    assert (tmp_path / "engine-0.argv").read_text() == (tmp_path / "engine-0.1.argv").read_text()
    assert "engine-0.1 was killed by SIGKILL" in str(
        next(e["detail"] for e in events(tmp_path) if e["event"] == "restart")
    )


def test_nobody_else_gets_the_port_of_a_worlds_coordinator(tmp_path: Path) -> None:
    """Between the choice of a port and its use another socket could take it."""
    started = Worker(worker("engine", tmp_path, WAIT, WAIT), tmp_path)
    started.start()
    try:
        assert _eventually(lambda: not started.silent())
        (command,) = Path(f"/proc/{started.pids['engine']}/cmdline").read_bytes().split(b"\0")[-2:-1]
        host, _, port = command.decode().rpartition(":")
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind((host, int(port)))
        with socket.socket() as grpc:  # as a server of gRPC does
            grpc.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            grpc.bind((host, int(port)))
            grpc.listen()
            with socket.create_connection((host, int(port)), 5) as client:
                assert grpc.accept()[1] == client.getsockname(), (
                    "what only keeps the port takes no connection"
                )
    finally:
        started.kill()
    assert started._port is None, "it is let go with the world"


def test_a_stopped_trainer_is_found_and_named(tmp_path: Path) -> None:
    trainer = "announce()\nos.kill(os.getpid(), signal.SIGSTOP)\n"
    outcome = supervise(tmp_path, run_of(tmp_path, trainer=trainer))
    assert outcome.code == 4
    assert "trainer-0" in outcome.cause
    assert ("stopped", "trainer-0") in [(e["event"], e["process"]) for e in events(tmp_path)]


def test_no_progress_ends_the_run_with_step_and_phase(tmp_path: Path) -> None:
    hangs = "announce()\nprogress(7, 'waiting for engine-0')\nstop.wait()\n"
    outcome = supervise(tmp_path, run_of(tmp_path, orchestrator=hangs), stuck_timeout_s=1.0)
    assert outcome.code == 4
    assert "at step 7, phase waiting for engine-0" in outcome.cause


def test_a_process_that_never_comes_up_is_named(tmp_path: Path) -> None:
    specs = run_of(tmp_path, engine="stop.wait()\n")
    supervisor = Supervisor(settings(start_timeout_s=60.0), tmp_path, specs, Notes(), "")

    def time_is_over() -> None:
        """Once all others are up, however long they took: the engine seems to have been started long ago."""
        others = [tmp_path / "proc" / f"{name}.json" for name in ("hub", "trainer-0", "orchestrator")]
        if _eventually(lambda: all(path.exists() for path in others)):
            supervisor._workers[2].started_at -= 61.0

    threading.Thread(target=time_is_over, daemon=True).start()
    outcome = supervisor.run()
    assert sweep.marked_pids(RUN_MARK, str(tmp_path)) == []
    assert outcome.code == 4
    assert outcome.cause.startswith("engine-0 did not come up within 60 s")


def test_a_hub_that_fails_at_once_ends_the_run_before_the_others_start(tmp_path: Path) -> None:
    hub = "print('jaxrl-sync: error: port 80 is in use', flush=True)\nsys.exit(3)\n"
    assert supervise(tmp_path, run_of(tmp_path, hub=hub)) == Outcome(3, "hub: port 80 is in use")
    assert not (tmp_path / "logs" / "trainer-0.log").exists()


def test_interrupt_drains_the_orchestrator_first(tmp_path: Path) -> None:
    note = "announce()\nprogress(1)\nstop.wait()\nopen(run / 'order', 'a').write(name + '\\n')\n"
    when_up(tmp_path, interrupt)
    outcome = supervise(tmp_path, run_of(tmp_path, note, note, note, note), grace_s=60.0)
    assert outcome == Outcome(130, "interrupted")
    order = (tmp_path / "order").read_text().split()
    assert (order[0], order[-1], sorted(order[1:3])) == ("orchestrator", "hub", ["engine-0", "trainer-0"])


def test_one_wish_that_arrives_twice_drains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As from timeout(1), to the process and to its group: it killed all, the trainer before it had saved."""
    monkeypatch.setattr(supervisor, "ECHO_S", 600.0)
    note = "announce()\nprogress(1)\nstop.wait()\n(run / f'{name}.asked').touch()\n"
    slow = note + "while not (run / 'again').exists():\n    time.sleep(0.02)\n"

    def twice() -> None:
        interrupt()
        if _eventually((tmp_path / "orchestrator.asked").exists):
            os.kill(os.getpid(), signal.SIGTERM)
            interrupt()
            (tmp_path / "again").touch()

    when_up(tmp_path, twice)
    outcome = supervise(tmp_path, run_of(tmp_path, note, note, note, slow), grace_s=60.0)
    assert outcome == Outcome(130, "interrupted")
    assert "kill" not in {e["event"] for e in events(tmp_path)}


def test_a_second_interrupt_kills_all_at_once_whatever_stage_the_first_has_reached(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "ECHO_S", 0.0)
    deaf = "signal.signal(signal.SIGTERM, lambda *a: (run / 'asked').touch())\nannounce()\nprogress(1)\n"
    deaf += "while True:\n    time.sleep(600)\n"

    def twice() -> None:
        interrupt()
        if _eventually((tmp_path / "asked").exists):
            interrupt()

    when_up(tmp_path, twice)
    outcome = supervise(tmp_path, run_of(tmp_path, deaf, deaf, deaf, deaf), grace_s=200.0)
    assert outcome == Outcome(130, "interrupted")
    kills = {e["process"]: e["detail"] for e in events(tmp_path) if e["event"] == "kill"}
    assert kills == dict.fromkeys(("orchestrator", "trainer-0", "engine-0", "hub"), "interrupted again")


def test_a_run_directory_that_vanishes_ends_the_run(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    when_up(run_dir, lambda: shutil.rmtree(run_dir, ignore_errors=True))
    outcome = supervise(run_dir, run_of(run_dir, orchestrator=WAIT))
    assert outcome == Outcome(3, f"run directory {run_dir} was deleted or emptied in mid-run")


def test_what_ignores_sigterm_is_killed_after_the_grace_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the supervisor's clock: it runs fast while nobody but the deaf one is left of those that it asks
    together, however long the others take."""
    ahead = 0.0

    def now() -> float:
        nonlocal ahead
        ended = tmp_path / "trainer-0.ends"
        if ended.exists() and not alive([int(ended.read_text())]):
            ahead += 100.0 * len(
                alive([json.loads((tmp_path / "proc" / "engine-0.json").read_text())["pid"]])
            )
        return time.monotonic() + ahead

    monkeypatch.setattr(supervisor, "time", SimpleNamespace(monotonic=now, sleep=time.sleep, time=time.time))
    deaf = "signal.signal(signal.SIGTERM, signal.SIG_IGN)\nannounce()\ntime.sleep(600)\n"
    ends = WAIT + "write(run / 'trainer-0.ends', os.getpid())\n"
    both = DONE_AFTER_ENGINE.replace("engine-0", "trainer-0") + DONE_AFTER_ENGINE
    both = both.replace(DONE, "", 1)
    specs = run_of(tmp_path, trainer=ends, engine=deaf, orchestrator=both)
    assert supervise(tmp_path, specs, grace_s=600.0).code == 0
    assert ("kill", "engine-0") in [(e["event"], e["process"]) for e in events(tmp_path)]


DONE_AFTER_TRAINER = DONE_AFTER_ENGINE.replace("engine-0", "trainer-0")
FULL_DISK = "announce()\nstop.wait()\nprint('jaxrl-sync: error: no space left', flush=True)\nsys.exit(3)\n"


def test_a_trainer_that_could_not_save_its_last_checkpoint_is_how_the_run_ended(tmp_path: Path) -> None:
    """The run said that all was well, and the weights were lost."""
    specs = run_of(tmp_path, trainer=FULL_DISK, orchestrator=DONE_AFTER_TRAINER)
    assert supervise(tmp_path, specs, grace_s=60.0) == Outcome(3, "trainer-0: no space left")


def test_a_trainer_that_is_killed_while_it_saves_is_how_the_run_ended(tmp_path: Path) -> None:
    saves = "signal.signal(signal.SIGTERM, signal.SIG_IGN)\nannounce()\ntime.sleep(600)\n"
    specs = run_of(tmp_path, trainer=saves, orchestrator=DONE_AFTER_TRAINER)
    outcome = supervise(tmp_path, specs, grace_s=2.0)
    said = "trainer-0 still ran 2 s after SIGTERM and was killed: its last checkpoint may be missing"
    assert outcome == Outcome(4, f"{said} (run.grace_s)")


def test_an_interrupted_run_says_that_nothing_was_saved(tmp_path: Path) -> None:
    when_up(tmp_path, interrupt)
    outcome = supervise(tmp_path, run_of(tmp_path, trainer=FULL_DISK), grace_s=60.0)
    assert outcome == Outcome(130, "interrupted; trainer-0: no space left")


def test_grandchildren_and_shared_memory_are_swept(tmp_path: Path) -> None:
    prefix = f"jaxrl_sync-test{os.getpid()}-"
    engine = "import subprocess\n"
    engine += (
        "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'], start_new_session=True)\n"
    )
    engine += f"open('/dev/shm/{prefix}slot', 'wb').write(b'x')\n" + WAIT
    specs = run_of(tmp_path, engine=engine, orchestrator=DONE_AFTER_ENGINE)
    assert supervise(tmp_path, specs, prefix) == Outcome(0)
    assert list(Path("/dev/shm").glob(f"{prefix}*")) == []
    assert "removed" in (tmp_path / "logs" / "guard.log").read_text()


def test_a_recycled_pid_is_not_killed(tmp_path: Path) -> None:
    """Only the mark decides: a process without it survives a sweep of the run."""
    bystander = Worker(worker("engine", tmp_path / "other", WAIT, name="bystander"), tmp_path / "other")
    (tmp_path / "other").mkdir()
    bystander.start()
    try:
        assert sweep.kill_marked(RUN_MARK, str(tmp_path), deadline_s=1.0) == []
        assert bystander.first_exit() is None
    finally:
        bystander.kill()


@pytest.mark.parametrize("code", [1, 2, 3, 4])
def test_documented_exit_codes_of_the_orchestrator_are_passed_on(tmp_path: Path, code: int) -> None:
    fails = f"announce()\nprint('jaxrl-sync: error: because')\nsys.exit({code})\n"
    assert supervise(tmp_path, run_of(tmp_path, orchestrator=fails)) == Outcome(code, "orchestrator: because")
