"""One process of an engine replica in a run: its world, its weights, its server. ``run`` is the whole life.

Rank 0: join the world, register with the hub as a subscriber, take the first version and verify it, compile,
then register as an engine and answer requests; later versions come by ``POST /swap`` or by themselves. The
other ranks prepare their shards of the same versions and execute the plans that rank 0 sends. A replica of
several ranks ends as one: see ``inference.group``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import secrets
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import AxisType, Mesh

from jaxrl_sync.inference import probe
from jaxrl_sync.inference.config import EngineConfig
from jaxrl_sync.inference.engine import Engine
from jaxrl_sync.inference.engine_thread import EngineThread
from jaxrl_sync.inference.errors import EngineError, RankDiedError
from jaxrl_sync.inference.group import Follower, Leader
from jaxrl_sync.inference.openai_api import openai_model
from jaxrl_sync.inference.request import PauseMode
from jaxrl_sync.inference.runner import Runner, target_tree
from jaxrl_sync.inference.server import EngineServer, ServerConfig
from jaxrl_sync.inference.updater import Record, Shadow, SwapPolicy, Updater
from jaxrl_sync.inference.world import join_world, meet
from jaxrl_sync.sharding.presets import qwen3
from jaxrl_sync.sharding.presets.quantized import quantized_convert
from jaxrl_sync.sharding.presets.qwen3 import DecoderConfig
from jaxrl_sync.transfer import auth
from jaxrl_sync.transfer.config import SubscriberConfig
from jaxrl_sync.transfer.files.config import FileSource
from jaxrl_sync.transfer.files.reader import FileSubscriber
from jaxrl_sync.transfer.hub.client import HubClient
from jaxrl_sync.transfer.subscriber import Subscriber
from jaxrl_sync.transfer.tls import ServerTls

WORLD_TIMEOUT_S = 120.0
DRAIN_S = 5.0
Announce = Callable[..., None]
log = logging.getLogger("jaxrl_sync.inference.process")


@dataclasses.dataclass(frozen=True)
class Spec:
    """What one rank of a replica is told; see ``run``."""

    config: EngineConfig
    model: DecoderConfig
    subscriber: SubscriberConfig
    dtype: str
    swap_policy: SwapPolicy
    auto_mode: PauseMode
    hub_url: str
    token_file: Path
    host: str
    port: int
    replica: int
    coordinator: str | None
    tokenizer: str | None
    tls: ServerTls | None
    metrics_open: bool
    files: FileSource | None

    @property
    def name(self) -> str:
        """The replica's name, the same on all its ranks."""
        return self.subscriber.engine


def run(
    engine: EngineConfig,
    model: DecoderConfig,
    subscriber: SubscriberConfig,
    *,
    dtype: str,
    swap_policy: SwapPolicy,
    auto_mode: PauseMode = "keep",
    hub_url: str,
    token_file: Path,
    host: str = "127.0.0.1",
    port: int = 0,
    replica: int = 0,
    coordinator: str | None = None,
    tokenizer: str | None = None,
    tls: ServerTls | None = None,
    metrics_open: bool = False,
    files: FileSource | None = None,
    stop: threading.Event,
    announce: Announce,
    record: Record,
) -> None:
    """Be rank ``subscriber.rank`` of an engine of ``subscriber.size`` processes until ``stop`` is set.

    The engine's mesh is one axis over all devices of all its ranks. ``announce(url)`` is called once the
    first version serves (followers: ``announce()`` once they have joined). ``record`` gets timeline rows.
    With ``files`` versions come from a file channel. Blocks; drains on ``stop``. Raises UserError for what a
    user can mend; a rank without peer ends itself.
    """
    spec = Spec(
        engine, model, subscriber, dtype, swap_policy, auto_mode, hub_url, token_file, host, port, replica,
        coordinator, tokenizer, tls, metrics_open, files,
    )  # fmt: skip
    with _world(spec):
        mesh = Mesh(np.array(jax.devices()), ("tp",), axis_types=(AxisType.Auto,))
        meet(mesh)
        spec = _with_shared_name(spec)
        target = target_tree(model, engine, mesh, np.dtype(dtype))
        token = auth.load_token(token_file)
        if subscriber.rank == 0:
            _lead(spec, mesh, target, token, stop, announce, record)
        else:
            _follow(spec, mesh, target, token, announce, record)


def engine_convert(model: DecoderConfig, config: EngineConfig, tp: int, dtype: str) -> Callable[[Any], Any]:
    """The function from the trainer's tree to this engine's tree; the trainer is given the same one."""
    convert: Callable[[Any], Any] = functools.partial(
        qwen3.convert, cfg=model, tp=tp, dtype=np.dtype(dtype), adapters=config.adapters
    )
    if config.quantization is not None:
        convert = quantized_convert(convert, config.quantization, tp)
    return probe.stamped_convert(convert) if config.version_probe else convert


@contextlib.contextmanager
def _world(spec: Spec) -> Any:
    """The jax.distributed world of a replica of several ranks; nothing for a single one."""
    rank, size = spec.subscriber.rank, spec.subscriber.size
    if size == 1:
        yield
        return
    if spec.coordinator is None:
        raise EngineError(f"{spec.name} rank {rank} of {size}: expected a coordinator address, found none")
    join_world(spec.coordinator, size, rank, timeout_s=WORLD_TIMEOUT_S, shutdown_s=20)
    yield
    jax.distributed.shutdown()


def _with_shared_name(spec: Spec) -> Spec:
    """Ranks that read from a file channel need a name in common that no other start of them had."""
    if spec.files is None or spec.files.config.size == 1:
        return spec
    shared = int(multihost_utils.broadcast_one_to_all(np.int32(secrets.randbits(31))))
    config = dataclasses.replace(spec.files.config, world=f"{spec.name}-{shared:08x}")
    return dataclasses.replace(spec, files=dataclasses.replace(spec.files, config=config))


def _subscribe(spec: Spec, mesh: Mesh, target: Any) -> Subscriber | FileSubscriber:
    convert = engine_convert(spec.model, spec.config, mesh.shape["tp"], spec.dtype)
    if spec.files is not None:
        token_file = spec.token_file if spec.files.sealed else None
        return FileSubscriber(
            spec.files.path, target, convert, token_file=token_file, config=spec.files.config
        )
    return Subscriber(spec.hub_url, target, convert, token_file=spec.token_file, config=spec.subscriber)


def _lead(
    spec: Spec, mesh: Mesh, target: Any, token: str, stop: threading.Event, announce: Announce, record: Record
) -> None:
    """Rank 0: engine, updates, server. What ends it in an error ends the other ranks with that error."""
    leader = _open_group(spec, token)
    with contextlib.ExitStack() as stack:
        if leader is not None:
            stack.callback(leader.close)
        with leader.telling() if leader is not None else contextlib.nullcontext():
            _serve(spec, mesh, target, token, stop, announce, record, leader, stack)


def _serve(
    spec: Spec,
    mesh: Mesh,
    target: Any,
    token: str,
    stop: threading.Event,
    announce: Announce,
    record: Record,
    leader: Leader | None,
    stack: contextlib.ExitStack,
) -> None:
    """Serve until ``stop`` is set; ``stack`` closes what this opens."""
    subscriber = _subscribe(spec, mesh, target)
    stack.callback(subscriber.close)
    engine = Engine(
        spec.config,
        spec.model,
        mesh,
        dtype=np.dtype(spec.dtype),
        transmit=leader.send_plan if leader else None,
        warm_up=True,
    )
    stack.callback(engine.close)
    thread = stack.enter_context(EngineThread(engine, record))
    on_prepare = leader.prepare if leader else lambda: None
    updater = Updater(
        engine,
        subscriber,
        spec.swap_policy,
        record=record,
        on_prepare=on_prepare,
        auto_mode=spec.auto_mode,
    )
    stack.callback(updater.close)
    server = _open_server(spec, engine, updater, subscriber, token, stack)
    updater.start()
    if _wait_ready(updater, thread, stop):
        hub = stack.enter_context(HubClient(spec.hub_url, spec.token_file, spec.subscriber.hub_timeout_s))
        info = {
            "url": server.url,
            "replica": spec.replica,
            "slots": spec.config.slots,
            "max_len": spec.config.max_len,
            "moves_itself": spec.swap_policy == "auto",
        }
        lease = hub.register("engine", spec.name, 0, 1, info, spec.subscriber.ttl_s)
        announce(server.url)
        while not stop.wait(0.2):
            _check(updater, thread)
            if lease.lost.is_set():
                raise RankDiedError(f"{spec.name}: {lease.reason}")
        lease.close()
    updater.close(1.0)  # a swap that waits for an offer ends now,
    subscriber.close()  # and here one that is being prepared: its answer must not hold up the drain
    server.close(DRAIN_S)


def _open_group(spec: Spec, token: str) -> Leader | None:
    size = spec.subscriber.size
    if size == 1:
        return None
    leader = Leader(spec.name, token, spec.host, size)
    with leader.telling():
        multihost_utils.broadcast_one_to_all(np.int32(leader.address[1]))
        leader.wait(WORLD_TIMEOUT_S)
    return leader


def _open_server(
    spec: Spec,
    engine: Engine,
    updater: Updater,
    subscriber: Subscriber | FileSubscriber,
    token: str,
    stack: contextlib.ExitStack,
) -> EngineServer:
    """The HTTP server; OpenAI's calls too where the run has a tokenizer."""

    def extra_stats() -> dict[str, Any]:
        prepared = updater.prepared
        return {
            "prepared": dataclasses.asdict(prepared) if prepared else None,
            "sync": dict(subscriber.stats()),
        }

    openai = openai_model(spec.tokenizer, spec.config, spec.model.vocab_size, stack)
    config = ServerConfig(
        host=spec.host, port=spec.port, name=spec.name, tls=spec.tls, metrics_open=spec.metrics_open
    )
    server = EngineServer(
        engine, token=token, config=config, openai=openai, swap=updater.swap, extra_stats=extra_stats
    )
    stack.callback(server.close, 0.0)
    return server


def _wait_ready(updater: Updater, thread: EngineThread, stop: threading.Event) -> bool:
    """Whether the first version serves; False when told to stop before."""
    while not updater.ready.wait(0.1):
        _check(updater, thread)
        if stop.is_set():
            return False
    return True


def _check(updater: Updater, thread: EngineThread) -> None:
    thread.check()
    if updater.error is not None:
        raise updater.error


def _follow(spec: Spec, mesh: Mesh, target: Any, token: str, announce: Announce, record: Record) -> None:
    """Another rank: execute the leader's plans until it says stop."""
    with contextlib.ExitStack() as stack:
        port = int(multihost_utils.broadcast_one_to_all(np.int32(0)))
        subscriber = _subscribe(spec, mesh, target)
        stack.callback(subscriber.close)
        shadow = Shadow(subscriber, record=record, timeout_s=spec.subscriber.timeout_s)
        stack.callback(shadow.close)
        stack.callback(subscriber.close)  # first: the shadow's thread may wait in it
        assert spec.coordinator is not None
        address = f"{spec.coordinator.rpartition(':')[0]}:{port}"
        follower = Follower(spec.name, spec.subscriber.rank, address, token, shadow.prepare)
        stack.callback(follower.close)
        runner = Runner(spec.model, spec.config, mesh, shadow.take, np.dtype(spec.dtype))
        announce()
        while (plan := follower.next_plan()) is not None:
            with follower.step():
                runner.execute(plan)
