"""The HTTP calls of an engine on a real engine: answers, refusals, deadlines, shutdown."""

from __future__ import annotations

import logging
import socket
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from jaxrl_sync.inference import http_shell
from jaxrl_sync.inference.engine import Engine
from jaxrl_sync.inference.engine_thread import EngineThread
from jaxrl_sync.inference.server import EngineServer, PortInUseError, ServerConfig
from tests.inference.served import CONFIG, TOKEN, eventually, generate_body

from .engine_helpers import make_engine, tp_mesh


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/generate"),
        ("POST", "/abort"),
        ("POST", "/pause"),
        ("POST", "/resume"),
        ("POST", "/swap"),
        ("POST", "/hold"),
        ("POST", "/release"),
        ("GET", "/stats"),
        ("GET", "/v1/models"),
        ("GET", "/metrics"),
        ("POST", "/v1/completions"),
        ("POST", "/v1/chat/completions"),
        ("GET", "/no/such/call"),
    ],
)
def test_every_call_but_health_needs_the_token(server: EngineServer, method: str, path: str) -> None:
    wrong = [
        None,
        "Bearer",
        f"Bearer {TOKEN}x",
        f"Bearer {TOKEN[:-1]}",
        f"Basic {TOKEN}",
        TOKEN,
        "Bearer \xe9",
    ]
    for value in wrong:
        headers = [] if value is None else [(b"Authorization", value.encode("latin-1"))]
        answer = httpx.request(method, server.url + path, headers=headers, timeout=60)
        assert answer.status_code == 401, value
        assert "run token" in answer.json()["error"]["message"]
        assert answer.headers["www-authenticate"] == "Bearer"
    assert httpx.get(server.url + "/health", timeout=60).status_code == 200


def test_refused_peer_is_logged_once(engine: Engine, caplog: pytest.LogCaptureFixture) -> None:
    with EngineServer(engine, token=TOKEN) as server, caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert httpx.get(server.url + "/stats", timeout=60).status_code == 401
    assert [r.getMessage() for r in caplog.records if "refused" in r.getMessage()] == [
        "engine-0 refused 127.0.0.1: /stats: no run token (logged once in 600 s)"
    ]


def test_metrics_tell_what_stats_tell(http: httpx.Client) -> None:
    http.post("/generate", json=generate_body("m1"))
    stats = http.get("/stats").json()
    answer = http.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    found = {
        (s.name, s.labels.get("state", "")): s.value
        for family in text_string_to_metric_families(answer.text)
        for s in family.samples
    }
    assert found["jaxrl_sync_engine_tokens_total", ""] == stats["tokens_generated"] > 0
    assert found["jaxrl_sync_engine_slots", ""] == stats["slots"]
    assert found["jaxrl_sync_engine_version_number", ""] == stats["version"]["number"]
    assert [found["jaxrl_sync_engine_state", s] for s in ("ready", "paused", "poisoned")] == [1, 0, 0]
    assert len(found) >= 14


def test_generate_answers_with_tokens_logprobs_and_versions(http: httpx.Client) -> None:
    answer = http.post("/generate", json={**generate_body("g1"), "n": 3}).json()
    assert (answer["request_id"], answer["engine"], answer["lineages"]) == ("g1", "e7", ["test"])
    assert len(answer["samples"]) == 3
    for sample in answer["samples"]:
        assert len(sample["tokens"]) == len(sample["logprobs"]) == len(sample["versions"]) == 5
        assert sample["finish_reason"] == "length" and sample["versions"][0] >= 0
    assert set(answer["timing"]) == {"queue_s", "prefill_s", "decode_s"}


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"prompt": [4]}, "request_id"),
        ({"request_id": "x", "prompt": [4] * 48}, "at most 47 tokens, got 48"),
        ({"request_id": "x", "prompt": [24]}, "expected < 24"),
        ({"request_id": "x", "prompt": [4], "samplng": {}}, "unknown field 'samplng'"),
        ({"request_id": "x", "prompt": [4], "sampling": {"temperature": -1}}, "temperature"),
        ({"request_id": "x", "prompt": [4], "version": 3}, "expected null or {lineage, number}"),
    ],
)
def test_wrong_generate_bodies_are_400(http: httpx.Client, body: dict[str, Any], words: str) -> None:
    answer = http.post("/generate", json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["type"] == "RequestError" and words in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("method", "path", "content", "status", "words"),
    [
        ("POST", "/generate", b"{", 400, "not JSON"),
        ("POST", "/generate", b"[1]", 400, "expected a JSON object, got list"),
        ("POST", "/generate", b"[" * 100_000, 400, "not JSON"),
        ("POST", "/generate", b" " * (http_shell.MAX_BODY_BYTES + 1), 413, "at most 8388608"),
        ("GET", "/generate", b"", 405, "GET /generate"),
        ("GET", "/nothing", b"", 404, "GET /nothing"),
        ("POST", "/pause", b'{"mode": "stop"}', 400, "keep or wait or abort, got 'stop'"),
        ("POST", "/abort", b'{"request_ids": "a"}', 400, "a list of strings"),
        ("POST", "/swap", b'{"lineage": "a", "number": -1}', 400, "integer >= 0"),
        ("POST", "/swap", b'{"lineage": "a", "number": 1, "mode": "stop"}', 400, "keep or wait or abort"),
        ("POST", "/swap", b'{"lineage": "a", "number": 1, "timeout_s": 1e9}', 400, "at most 3600"),
    ],
)
def test_wrong_calls_say_what_is_wrong(
    http: httpx.Client, method: str, path: str, content: bytes, status: int, words: str
) -> None:
    answer = http.request(method, path, content=content)
    assert answer.status_code == status and words in answer.json()["error"]["message"]


def test_body_of_unknown_length_is_limited_too(http: httpx.Client) -> None:
    answer = http.post("/generate", content=(b" " * (1 << 20) for _ in range(9)))
    assert answer.status_code == 413


def test_pin_must_be_the_served_version(http: httpx.Client) -> None:
    served = http.get("/health").json()["version"]
    assert http.post("/generate", json={**generate_body("p1"), "version": served}).status_code == 200
    other = {**served, "number": served["number"] + 1}
    answer = http.post("/generate", json={**generate_body("p2"), "version": other})
    assert answer.status_code == 409 and answer.json()["error"]["type"] == "VersionMismatchError"


def test_full_queue_is_429_and_a_running_id_is_400(http: httpx.Client, frozen: None, engine: Engine) -> None:
    with ThreadPoolExecutor(8) as pool:
        calls = [
            pool.submit(http.post, "/generate", json={**generate_body(f"q{i}"), "n": 4}) for i in range(3)
        ]
        eventually(lambda: engine.stats().waiting + engine.stats().running == 12)
        full = http.post("/generate", json=generate_body("q9"))
        assert full.status_code == 429 and full.json()["error"]["type"] == "QueueFullError"
        assert full.headers["retry-after"] == "1"
        again = http.post("/generate", json=generate_body("q0"))
        assert again.status_code == 400 and "'q0' is already running" in again.json()["error"]["message"]
        assert http.post("/abort", json={"request_ids": ["q0", "q1", "q2", "zz"]}).json() == {"aborted": 3}
        http.post("/resume")
        samples = [s for c in calls for s in c.result(60).json()["samples"]]
    assert {s["finish_reason"] for s in samples} == {"abort"}


def test_timeout_answers_with_what_there_is(http: httpx.Client, frozen: None) -> None:
    answer = http.post("/generate", json={**generate_body("t1"), "timeout_s": 0.2})
    assert answer.status_code == 200
    assert [s["finish_reason"] for s in answer.json()["samples"]] == ["timeout"]


def test_pause_and_resume_are_idempotent(http: httpx.Client) -> None:
    for _ in range(2):
        assert http.post("/pause", json={"mode": "wait"}).json() == {"state": "paused"}
        assert http.get("/health").json()["state"] == "paused"
    for _ in range(2):
        assert http.post("/resume").json() == {"state": "ready"}


def test_stats_name_the_engine_and_take_extra_entries(http: httpx.Client) -> None:
    stats = http.get("/stats").json()
    assert stats["engine"] == "e7" and stats["prepared"] == 3
    wanted = (
        "state version running waiting slots steps tokens_generated decode_step_s_median mixed_version_steps"
    )
    assert set(wanted.split()) <= set(stats)


def test_a_version_is_held_and_released(http: httpx.Client) -> None:
    serving = http.get("/health").json()["version"]
    assert http.post("/hold", json={**serving, "timeout_s": 30}).json() == {"held": True}
    other = http.post("/hold", json={"lineage": "test", "number": 77})
    assert other.status_code == 409 and other.json()["error"]["type"] == "VersionMismatchError"
    assert http.post("/hold", json={"number": 1}).status_code == 400
    assert http.post("/release").json() == http.post("/release").json() == {"held": False}


def test_swap_answers_or_fails_by_its_deadline(http: httpx.Client) -> None:
    assert http.post("/swap", json={"lineage": "test", "number": 1}).json() == {"number": 1}
    assert http.get("/health").json()["version"] == {"lineage": "test", "number": 1}
    late = http.post("/swap", json={"lineage": "test", "number": 666, "timeout_s": 1})
    assert late.status_code == 504 and late.json()["error"]["type"] == "SwapTimeoutError"
    assert http.get("/health").json()["version"] == {"lineage": "test", "number": 1}


def test_engine_without_hub_or_tokenizer_says_so(engine: Engine) -> None:
    headers = {"Authorization": f"bearer {TOKEN}"}
    with EngineServer(engine, token=TOKEN) as server:
        swap = httpx.post(
            server.url + "/swap", headers=headers, json={"lineage": "a", "number": 1}, timeout=60
        )
        models = httpx.get(server.url + "/v1/models", headers=headers, timeout=60)
    assert swap.status_code == 404 and "no hub" in swap.json()["error"]["message"]
    assert models.status_code == 404 and "no tokenizer" in models.json()["error"]["message"]


def test_engine_without_weights_refuses_until_it_has_them() -> None:
    headers = {"Authorization": f"Bearer {TOKEN}"}
    with (
        Engine(CONFIG, make_engine(CONFIG).model, tp_mesh()) as engine,
        EngineThread(engine),
        EngineServer(engine, token=TOKEN) as server,
    ):
        assert httpx.get(server.url + "/health", timeout=60).json() == {"state": "starting", "version": None}
        answer = httpx.post(server.url + "/generate", headers=headers, json=generate_body("s"), timeout=60)
        assert answer.status_code == 503 and answer.json()["error"]["type"] == "NotServingError"
        engine.poison("half a version")
        assert httpx.get(server.url + "/health", timeout=60).json()["state"] == "poisoned"
        answer = httpx.post(server.url + "/generate", headers=headers, json=generate_body("s"), timeout=60)
        assert answer.status_code == 503 and "half a version" in answer.json()["error"]["message"]


def test_step_that_raises_fails_the_waiting_client_at_once() -> None:
    def transmit(plan: object) -> None:
        raise RuntimeError("a peer is gone")

    headers = {"Authorization": f"Bearer {TOKEN}"}
    with (
        make_engine(CONFIG, transmit=transmit) as engine,
        EngineThread(engine) as thread,
        EngineServer(engine, token=TOKEN) as server,
    ):
        answer = httpx.post(server.url + "/generate", headers=headers, json=generate_body("s"), timeout=30)
        assert answer.status_code == 503 and "closed" in answer.json()["error"]["message"]
        with pytest.raises(RuntimeError, match="a peer is gone"):
            thread.check()


def test_taken_port_is_one_line_and_exit_code_3(engine: Engine) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(PortInUseError) as caught:
        EngineServer(engine, token=TOKEN, config=ServerConfig(port=taken.getsockname()[1]))
    assert caught.value.exit_code == 3
    assert str(caught.value).endswith(": Address already in use") and "\n" not in str(caught.value)


def test_close_lets_running_generations_end_and_refuses_new_ones(engine: Engine) -> None:
    headers = {"Authorization": f"Bearer {TOKEN}"}
    server = EngineServer(engine, token=TOKEN)
    engine.pause("keep").result(20)
    with ThreadPoolExecutor(2) as pool:
        running = pool.submit(
            httpx.post, server.url + "/generate", headers=headers, json=generate_body("d1"), timeout=60
        )
        eventually(lambda: engine.stats().waiting + engine.stats().running == 1)
        closing = pool.submit(server.close, 30.0)
        eventually(lambda: server._calls.draining)
        late = httpx.post(server.url + "/generate", headers=headers, json=generate_body("d2"), timeout=60)
        assert late.status_code == 503 and "shutting down" in late.json()["error"]["message"]
        engine.resume().result(20)
        assert [s["finish_reason"] for s in running.result(60).json()["samples"]] == ["length"]
        closing.result(60)
    with pytest.raises(httpx.ConnectError):
        httpx.get(server.url + "/health", timeout=60)


def test_a_refused_twin_does_not_hide_the_running_generation_from_close(engine: Engine) -> None:
    headers = {"Authorization": f"Bearer {TOKEN}"}
    server = EngineServer(engine, token=TOKEN)
    engine.pause("keep").result(20)
    with ThreadPoolExecutor(1) as pool:
        call = server.url + "/generate"
        running = pool.submit(httpx.post, call, headers=headers, json=generate_body("d4"), timeout=60)
        eventually(lambda: engine.stats().waiting + engine.stats().running == 1)
        assert httpx.post(call, headers=headers, json=generate_body("d4"), timeout=60).status_code == 400
        assert server._calls.open_generations == 1
        server.close(drain_s=0.1)
        assert [s["finish_reason"] for s in running.result(60).json()["samples"]] == ["abort"]
    engine.resume().result(20)


def test_close_aborts_what_does_not_end_in_time(engine: Engine) -> None:
    headers = {"Authorization": f"Bearer {TOKEN}"}
    server = EngineServer(engine, token=TOKEN)
    engine.pause("keep").result(20)
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(
            httpx.post, server.url + "/generate", headers=headers, json=generate_body("d3"), timeout=60
        )
        eventually(lambda: engine.stats().waiting + engine.stats().running == 1)
        server.close(drain_s=0.1)
        assert [s["finish_reason"] for s in running.result(60).json()["samples"]] == ["abort"]
    engine.resume().result(20)
