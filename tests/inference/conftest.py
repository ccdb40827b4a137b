"""An engine behind its HTTP server, for the tests of that server."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

import httpx
import pytest

from jaxrl_sync.inference.chat import chat_format
from jaxrl_sync.inference.engine import Engine
from jaxrl_sync.inference.engine_thread import EngineThread
from jaxrl_sync.inference.errors import SwapTimeoutError
from jaxrl_sync.inference.openai_api import OpenAIModel
from jaxrl_sync.inference.request import PauseMode
from jaxrl_sync.inference.server import EngineServer, ServerConfig
from jaxrl_sync.transfer.version import Version
from tests.inference.served import CONFIG, DIGITS, TOKEN, eventually

from .engine_helpers import engine_weights, make_engine, tp_mesh


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with make_engine(CONFIG) as engine, EngineThread(engine):
        yield engine


@pytest.fixture(scope="module")
def server(engine: Engine) -> Iterator[EngineServer]:
    def swap(version: Version, timeout_s: float, mode: PauseMode) -> Future[dict[str, Any]]:
        answer: Future[dict[str, Any]] = Future()
        if version.number == 666:
            answer.set_exception(SwapTimeoutError("pinned groups were still running"))
            return answer
        weights = engine_weights(version.number, tp_mesh(), config=CONFIG)
        report = engine.request_swap(version, lambda: weights, timeout_s)
        report.add_done_callback(lambda f: answer.set_result({"number": f.result().version.number}))
        return answer

    openai = OpenAIModel("policy", CONFIG, engine.model.vocab_size, DIGITS, chat_format(DIGITS))
    extra: Callable[[], dict[str, Any]] = lambda: {"prepared": 3}  # noqa: E731
    with EngineServer(
        engine, token=TOKEN, config=ServerConfig(name="e7"), openai=openai, swap=swap, extra_stats=extra
    ) as running:
        yield running


@pytest.fixture
def http(server: EngineServer) -> Iterator[httpx.Client]:
    headers = {"Authorization": f"Bearer {TOKEN}"}
    with httpx.Client(base_url=server.url, headers=headers, timeout=60) as client:
        yield client


@pytest.fixture
def frozen(http: httpx.Client, engine: Engine) -> Iterator[None]:
    """The engine paused, so that whatever is submitted stays under way; afterwards it is idle and ready."""
    assert http.post("/pause", json={"mode": "keep"}).json() == {"state": "paused"}
    yield
    assert http.post("/resume").json() == {"state": "ready"}
    eventually(lambda: engine.stats().running == engine.stats().waiting == 0)
