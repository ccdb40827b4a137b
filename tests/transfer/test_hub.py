"""The hub: state machine on literal events, then the real server and clients over loopback."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from jaxrl_sync.transfer import auth, impatient
from jaxrl_sync.transfer.errors import AuthError, DeadlineError, PeerLost, ResourceError
from jaxrl_sync.transfer.hub import machine
from jaxrl_sync.transfer.hub.client import HubClient, HubRefused
from jaxrl_sync.transfer.hub.server import Hub, run_hub
from jaxrl_sync.transfer.hub.state import HubState, MemberKey
from jaxrl_sync.transfer.version import Version
from tests.ports import free_port
from tests.transfer.models import LEASE_S, ServerThread, until

A1, A2, B0 = Version("a", 1), Version("a", 2), Version("b", 0)
PUB = MemberKey("publisher", "trainer", 0)
MODEL = {"model": "policy"}


def run(state: HubState, *events: machine.Event, now: float = 0.0) -> HubState:
    """Apply events that must all be taken."""
    for event in events:
        state, outcome = machine.step(state, event, now)
        assert isinstance(outcome, machine.Done), outcome
    return state


def sub(engine: str, rank: int = 0) -> MemberKey:
    return MemberKey("subscriber", engine, rank)


def join(
    key: MemberKey, size: int = 1, incarnation: str = "i", installed: Version | None = None
) -> machine.Register:
    return machine.Register(key, size, incarnation, MODEL, 10.0, installed)


def announce(version: Version, rank: int = 0, incarnation: str = "i") -> machine.Announce:
    return machine.Announce(MemberKey("publisher", "trainer", rank), incarnation, "policy", version, 8, 0.0)


def offer(state: HubState, key: MemberKey, incarnation: str = "i") -> dict[str, Any] | None:
    seen = machine.watch(state, key, incarnation)
    assert isinstance(seen, dict), seen
    return seen["offer"]  # type: ignore[no-any-return]


def advance(key: MemberKey, round_id: str, to: Any) -> machine.Advance:
    return machine.Advance(key, "i", round_id, to, 5.0)


def test_version_is_published_when_all_ranks_announced() -> None:
    state = run(HubState("e"), join(PUB, 2), join(PUB._replace(rank=1), 2), announce(A1))
    assert machine.newest_version(state, "policy") is None
    state = run(state, announce(A1, rank=1))
    newest = machine.newest_version(state, "policy")
    assert newest is not None and newest["version"] == {"lineage": "a", "number": 1} and newest["available"]


def test_all_ranks_of_an_engine_get_one_version() -> None:
    state = run(HubState("e"), join(PUB), join(sub("x"), 2), announce(A1))
    assert offer(state, sub("x")) is None  # the second rank isn't there yet
    state = run(state, join(sub("x", 1), 2))
    first, second = offer(state, sub("x")), offer(state, sub("x", 1))
    assert first is not None and first == second
    state = run(state, advance(sub("x"), first["round"], "begun"), announce(A2))
    assert offer(state, sub("x", 1)) == first  # pinned once a rank began
    state = run(state, *[advance(sub("x", r), first["round"], "installed") for r in (0, 1)])
    newer = offer(state, sub("x"))
    assert newer is not None and newer["version"]["number"] == 2
    assert state.closed[first["round"]].state == "committed"


def test_slow_engine_skips_superseded_versions() -> None:
    state = run(HubState("e"), join(PUB), join(sub("x")), announce(A1))
    first = offer(state, sub("x"))
    state = run(state, announce(A2))
    second = offer(state, sub("x"))
    assert first and second and second["version"]["number"] == 2
    assert state.closed[first["round"]].state == "superseded"
    _, outcome = machine.step(state, advance(sub("x"), first["round"], "begun"), 0.0)
    assert isinstance(outcome, machine.Refused) and outcome.code == "round_over"


@pytest.mark.invariant(7)
@pytest.mark.invariant(8)
def test_versions_only_grow_within_a_lineage_and_a_new_lineage_is_an_anchor() -> None:
    state = run(HubState("e"), join(PUB), join(sub("x"), installed=A2), announce(A2))
    assert offer(state, sub("x")) is None
    _, outcome = machine.step(state, announce(A1), 0.0)
    assert isinstance(outcome, machine.Refused) and outcome.code == "regress"
    state = run(state, announce(A2))  # said again: fine
    assert offer(state, sub("x")) is None
    state = run(state, announce(B0))
    offered = offer(state, sub("x"))
    assert offered is not None and offered["version"] == {"lineage": "b", "number": 0}


@pytest.mark.invariant(35)
def test_publishing_a_label_aborts_no_round() -> None:
    state = run(HubState("e"), join(PUB), join(sub("x")), announce(A1))
    first = offer(state, sub("x"))
    assert first is not None
    state = run(state, advance(sub("x"), first["round"], "prepared"), announce(A2))
    assert state.rounds[first["round"]].state == "open"


def test_a_replaced_process_that_wakes_up_late_does_not_come_back() -> None:
    state = run(HubState("e"), join(PUB, incarnation="old"))
    state = run(state, machine.Tick(), now=11.0)  # it stands still, its lease runs out
    state = run(state, join(PUB, incarnation="new"), announce(B0, incarnation="new"), now=12.0)
    after, outcome = machine.step(state, join(PUB, incarnation="old"), 13.0)  # it was told so, and wakes up
    assert isinstance(outcome, machine.Refused) and outcome.code == "replaced"
    assert after.members[PUB].incarnation == "new"
    state = run(state, machine.Tick(), now=30.0)
    run(state, join(PUB, incarnation="new"), now=31.0)  # who wasn't replaced may


def test_dead_or_replaced_members_end_their_rounds() -> None:
    state = run(HubState("e"), join(PUB), join(sub("x")), announce(A1))
    first = offer(state, sub("x"))
    assert first is not None
    state = run(state, advance(sub("x"), first["round"], "begun"))
    replaced = run(state, join(PUB, incarnation="j"))
    assert replaced.closed[first["round"]].state == "failed"
    assert offer(replaced, sub("x")) is None  # the new process holds nothing yet
    _, outcome = machine.step(replaced, announce(A2), 0.0)
    assert isinstance(outcome, machine.Refused) and outcome.code == "replaced"
    expired = run(state, machine.Tick(), now=11.0)
    assert not expired.members and expired.closed[first["round"]].state == "aborted"


def test_round_past_its_deadline_is_aborted_and_offered_again() -> None:
    state = run(HubState("e"), join(PUB), join(sub("x"), 2), join(sub("x", 1), 2), announce(A1))
    first = offer(state, sub("x"))
    assert first is not None
    state = run(state, advance(sub("x"), first["round"], "begun"))
    state = run(state, machine.Tick(), now=6.0)
    second = offer(state, sub("x"))
    assert second is not None and second["round"] != first["round"]
    assert "deadline" in state.closed[first["round"]].reason


@pytest.mark.invariant(65)
def test_restarted_replica_is_offered_the_current_weights() -> None:
    state = run(HubState("e"), join(PUB), join(sub("x"), installed=A1), announce(A1))
    assert offer(state, sub("x")) is None
    state = run(state, join(sub("x"), incarnation="j"))
    assert offer(state, sub("x"), "j") is not None


def test_client_registers_announces_and_polls(hub: ServerThread, token_file: Path) -> None:
    with HubClient(hub.url, token_file) as client:
        assert client.newest() is None
        lease = client.register("publisher", "trainer", 0, 1, dict(MODEL), ttl_s=LEASE_S)
        found: list[Any] = []
        waiter = threading.Thread(target=lambda: found.append(client.wait_version(None, 60)))
        waiter.start()
        time.sleep(0.1)
        lease.call(
            "/v1/event/announce", {"model": "policy", "version": {"lineage": "a", "number": 3}, "bytes": 7}
        )
        waiter.join(60)
        assert found[0].version == Version("a", 3) and found[0].nbytes == 7
        assert client.wait_version(Version("a", 3), 0.1) is None
        assert [m.name for m in client.wait_members("publisher", 1, 60)] == ["trainer"]
        with pytest.raises(DeadlineError, match="0 of 1"):
            client.wait_members("engine", 1, 0.1)
        assert client.status()["newest"]["policy"]["available"]
        assert client.run_id == auth.run_id_of(auth.load_token(token_file))
        blob = os.urandom(1 << 20)
        assert client.get_blob(client.put_blob(blob)) == blob
        with pytest.raises(HubRefused, match="blob"):
            client.get_blob("0" * 64)
        lease.close()
        until(lambda: client.members() == [])  # to leave is said once, and not waited for


def test_lease_outlives_its_ttl_and_a_second_process_replaces_the_first(
    hub: ServerThread, token_file: Path
) -> None:
    lost: list[str] = []
    ttl_s = 9.0
    with HubClient(hub.url, token_file) as client, HubClient(hub.url, token_file) as other:
        first = client.register("engine", "engine-0", ttl_s=ttl_s, on_lost=lost.append)
        registered = time.monotonic()

        def outlives() -> bool:
            """Whether it ends later than what was registered would."""
            asked = time.monotonic()
            left_s: float = client.status()["leases"].get(str(first.key), 0.0)
            return left_s > registered + ttl_s - asked + 0.5

        until(outlives)
        until(lambda: len(client.members("engine")) == 1)
        other.register("engine", "engine-0", ttl_s=ttl_s)
        assert first.lost.wait(60)
        until(lambda: bool(lost))
        assert "replaced" in lost[0]


def test_wrong_or_missing_token_is_refused(hub: ServerThread, tmp_path: Path) -> None:
    auth.create_token(tmp_path / "other")
    with HubClient(hub.url, tmp_path / "other") as client, pytest.raises(AuthError):
        client.status()
    assert httpx.get(f"{hub.url}/v1/status", timeout=60).status_code == 401
    assert httpx.get(f"{hub.url}/health", timeout=60).json() == {"state": "ready"}


def test_bad_and_oversized_bodies_are_refused_and_the_hub_lives(hub: ServerThread, token_file: Path) -> None:
    headers = auth.bearer_headers(auth.load_token(token_file))
    for body in (b"nonsense", b"[]", b'{"role": 1}', b"x" * (5 << 20)):
        answer = httpx.post(f"{hub.url}/v1/event/register", content=body, headers=headers, timeout=60)
        assert answer.status_code == 400, answer.text
    bad = {
        "role": "publisher",
        "name": "t",
        "rank": 0,
        "incarnation": "i",
        "model": "m",
        "version": {"lineage": 3},
    }
    with httpx.Client(base_url=hub.url, headers=headers, timeout=60) as client:
        assert client.post("/v1/event/announce", json=bad).status_code == 400
        assert client.get("/v1/status").status_code == 200


def test_a_client_that_never_finishes_its_headers_is_cut_off(
    token_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("jaxrl_sync.transfer.impatient.HEADERS_DEADLINE_S", 0.3)
    hub = ServerThread(token_file)
    try:
        host, port = hub.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), 60) as slow:
            slow.sendall(b"POST /v1/event/register HTTP/1.1\r\nHost: x\r\n")
            slow.settimeout(60)
            assert slow.recv(100) == b""
        with HubClient(hub.url, token_file) as client:
            time.sleep(0.5)  # idle, but within its keep-alive time
            assert client.status()["members"] == []
    finally:
        hub.close()


@pytest.mark.invariant(28)
def test_a_hub_that_ends_answers_its_long_polls(
    token_file: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    polled, real = threading.Event(), Hub.poll

    async def hear(self: Hub, *question: Any) -> Any:
        polled.set()
        return await real(self, *question)

    real_server = impatient.server

    def gentle(*about: Any, **settings: Any) -> Any:
        """A hub that hangs up on nobody within its second: what isn't answered would hold up its end."""
        return real_server(*about, **{**settings, "timeout_graceful_shutdown": 120})

    monkeypatch.setattr(impatient, "server", gentle)
    monkeypatch.setattr(Hub, "poll", hear)
    hub = ServerThread(token_file)
    answers: list[Any] = []
    with HubClient(hub.url, token_file, timeout_s=0.2) as client:
        poll = threading.Thread(
            target=lambda: answers.append(client.call("/v1/newest", {"model": "m", "timeout_s": 60}, 60))
        )
        poll.start()
        assert polled.wait(60)
        start = time.monotonic()
        hub.close()
        poll.join(60)
        assert time.monotonic() - start < 50 and answers[0]["newest"] is None
    assert "Exception" not in caplog.text


def test_only_loopback_is_quiet(token_file: Path, caplog: pytest.LogCaptureFixture) -> None:
    stop = threading.Event()
    stop.set()
    run_hub("127.0.0.1", 0, token_file, stop=stop)
    assert "LISTENS" not in caplog.text
    run_hub("0.0.0.0", 0, token_file, stop=stop)
    assert "THE HUB LISTENS ON 0.0.0.0" in caplog.text


def test_taken_port_is_a_named_error(token_file: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(ResourceError, match="can't listen"):
            run_hub("127.0.0.1", taken.getsockname()[1], token_file)


def test_unreachable_hub_is_a_named_error_in_time(token_file: Path) -> None:
    with HubClient("http://127.0.0.1:9", token_file, timeout_s=0.3) as client:
        start = time.monotonic()
        with pytest.raises(PeerLost, match=r"didn't answer for 0\.3 s"):
            client.status()
        assert time.monotonic() - start < 30


HUB_PROCESS = """
import sys
from jaxrl_sync.transfer.hub.server import run_hub
assert "jax" not in sys.modules
run_hub("127.0.0.1", int(sys.argv[1]), sys.argv[2], announce=lambda url: print(url, flush=True))
"""


def start_hub(port: int, token_file: Path) -> tuple[subprocess.Popen[str], str]:
    command = [sys.executable, "-c", HUB_PROCESS, str(port), str(token_file)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    return process, process.stdout.readline().strip()


@pytest.mark.slow
def test_killed_hub_is_rebuilt_by_its_members(token_file: Path) -> None:
    process, url = start_hub(free_port(), token_file)
    rejoined = threading.Event()
    with HubClient(url, token_file, timeout_s=120) as client:
        client.register("engine", "engine-0", info={"url": "u"}, ttl_s=1.5, on_rejoin=rejoined.set)
        process.send_signal(signal.SIGKILL)
        process.wait()
        process, _ = start_hub(int(url.rsplit(":", 1)[1]), token_file)
        assert rejoined.wait(60)
        until(lambda: [m.info for m in client.members("engine")] == [{"url": "u"}])
    process.terminate()
    process.wait(60)
    assert process.stdout is not None
    process.stdout.close()


def test_client_and_server_never_import_jax() -> None:
    code = (
        "import sys, jaxrl_sync.transfer.hub.client, jaxrl_sync.transfer.hub.server;"
        "import jaxrl_sync.transfer.config;"
        "print('jax' in sys.modules)"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert out.stdout.strip() == "False"


def test_an_answer_to_a_garbled_stream_is_none_and_the_call_is_sent_again(token_file: Path) -> None:
    """A stream that was doubled on its way leaves the server's complaint where the next answer should be."""
    body = b'{"epoch": "e", "run_id": "r", "members": []}'
    answers = [
        b"HTTP/1.1 400 Bad Request\r\ncontent-type: text/plain\r\ncontent-length: 3\r\n\r\nbad",
        b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n"
        b"content-length: %d\r\n\r\n%b" % (len(body), body),
    ]
    calls: list[bytes] = []

    def serve(listener: socket.socket) -> None:
        for answer in answers:
            sock, _ = listener.accept()
            with sock:
                call = b""
                while not call.endswith(b"}"):  # headers and body are written one after the other
                    call += sock.recv(65536)
                calls.append(call)
                sock.sendall(answer)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve, args=(listener,))
        thread.start()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        with HubClient(url, token_file) as client:
            assert client.members() == []
        thread.join(60)
    assert len(calls) == 2
