"""The engine that lives in the trainer's processes: generation and training take turns on one thread.

    rank 0    HTTP server (in a thread), scheduler, engine steps; decides when it is the trainer's turn
    others    execute the plans that rank 0 sends, until it says "turn"

The training thread of every rank runs both, so an engine step never lies inside a train step, and all ranks
enter the collectives of both in one order: that of rank 0, which goes to the others over one TCP connection
each (``inference.group``). A turn of the trainer: the engine ends what is pinned to its version, pauses as
``sync.pause_mode`` says and sleeps (weights let go, and the cache unless ``engine.sleep`` is ``keep``);
optimizer state returns to the devices; the update. Then optimizer state leaves, and the engine wakes with the
new weights.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import os
import time
from collections.abc import Callable, Mapping
from typing import Any, Literal, Protocol

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from jaxrl_sync.config.convert import to_decoder, to_engine
from jaxrl_sync.config.process import PeerError, ProcessContext, Timeline, write_json
from jaxrl_sync.inference.arrivals import Arrivals, swap_answer
from jaxrl_sync.inference.engine import Engine
from jaxrl_sync.inference.engine_thread import Spans
from jaxrl_sync.inference.errors import EngineError
from jaxrl_sync.inference.group import Follower, Leader
from jaxrl_sync.inference.inprocess import InProcess, Installed
from jaxrl_sync.inference.openai_api import openai_model
from jaxrl_sync.inference.plan import StepPlan
from jaxrl_sync.inference.process import engine_convert
from jaxrl_sync.inference.request import PauseMode
from jaxrl_sync.inference.runner import Runner, target_tree
from jaxrl_sync.inference.server import EngineServer, ServerConfig
from jaxrl_sync.inference.world import meet
from jaxrl_sync.trainer.axes import Tree
from jaxrl_sync.trainer.world import World
from jaxrl_sync.transfer import auth
from jaxrl_sync.transfer.hub.client import HubClient, Lease
from jaxrl_sync.transfer.tls import ServerTls
from jaxrl_sync.transfer.version import Version

Turn = Literal["train", "generate", "stop"]
NAME = "engine-0"
_IDLE_S = 0.005
_DRAIN_S = 5.0
logger = logging.getLogger("jaxrl_sync.trainer")


class Neighbour(Protocol):
    """The engine beside a trainer loop, as the loop sees it; every call is made on the training thread."""

    def generate(self, pending: Callable[[], bool], timeout_s: float) -> Turn:
        """Serve for about ``timeout_s``, or until it is the trainer's turn ("train": the engine sleeps now)
        or the other ranks leave ("stop")."""
        ...

    def wake(self, version: Version) -> float:
        """Serve the trainer's weights of this moment as ``version``; seconds that it kept this thread."""
        ...

    def leave(self) -> None:
        """No turn comes any more: the other ranks stop too, and the devices are the trainer's."""
        ...


@dataclasses.dataclass(frozen=True)
class Place:
    """What leader and followers share: the mesh over all devices of the world and the way to the weights."""

    context: ProcessContext
    mesh: Mesh
    weights: Callable[[int], Tree]
    inside: InProcess

    @classmethod
    def of(cls, context: ProcessContext, weights: Callable[[int], Tree]) -> Place:
        """Collective over the world. ``weights``: from a version number to the tree that is published."""
        config = context.config
        engine, dtype = to_engine(config), config.engine.dtype
        mesh = Mesh(np.array(jax.devices()), ("tp",), axis_types=(AxisType.Auto,))
        meet(mesh)
        convert = engine_convert(to_decoder(config), engine, mesh.shape["tp"], dtype)
        target = target_tree(to_decoder(config), engine, mesh, np.dtype(dtype))
        return cls(context, mesh, weights, InProcess(convert, weights(0), target))

    @property
    def release_cache(self) -> bool:
        return self.context.config.engine.sleep == "release"

    def take(self, version: Version) -> Installed:
        """This rank's part of the engine tree of the live weights."""
        return self.inside.take(self.weights(version.number))


class Lead:
    """Rank 0: engine, server, registration. ``close`` (or ``with``) ends all of them."""

    def __init__(self, place: Place, world: World, hub_url: str, tls: ServerTls | None) -> None:
        context = place.context
        config, token = context.config, auth.load_token(context.token_file)
        self._place = place
        self._mode: PauseMode = config.sync.pause_mode
        self._stack = contextlib.ExitStack()
        self._arrivals = Arrivals()
        self._asleep_at: float | None = None
        self._counts = {"sleeps": 0, "slept_s": 0.0, "freed_bytes": 0, "copied_bytes": 0, "shared_bytes": 0}
        self._installed: Installed | None = None
        timeout_s = config.run.start_timeout_s
        self._leader: Leader | None = None
        if world.size > 1:
            self._leader = Leader(NAME, token, config.run.host, world.size)
            self._stack.callback(self._leader.close)
            world.share({"engine_port": self._leader.address[1]}, timeout_s)
            self._leader.wait(timeout_s)
        self._engine = Engine(
            to_engine(config),
            to_decoder(config),
            place.mesh,
            dtype=np.dtype(config.engine.dtype),
            transmit=self._leader.send_plan if self._leader else None,
            warm_up=True,
        )
        self._stack.callback(self._engine.close)
        timeline = Timeline(context.run_dir / "timeline" / f"{NAME}.jsonl")
        self._stack.callback(timeline.close)
        self._spans = Spans(self._engine, timeline.record)
        self._stack.callback(self._spans.flush)
        self._record = timeline.record
        self._server = self._serve(token, tls)
        self._hub = self._stack.enter_context(HubClient(hub_url, context.token_file, timeout_s))
        self._lease: Lease | None = None

    def _serve(self, token: str, tls: ServerTls | None) -> EngineServer:
        config, engine = self._place.context.config, self._engine
        openai = openai_model(config.model.tokenizer, engine.config, engine.model.vocab_size, self._stack)
        settings = ServerConfig(
            host=config.run.host,
            port=config.engine.port,
            name=NAME,
            tls=tls,
            metrics_open=config.hub.metrics_open,
        )
        server = EngineServer(
            engine,
            token=token,
            config=settings,
            openai=openai,
            swap=self._arrivals.swap,
            extra_stats=self._stats,
            slept_s=self._slept_s,
        )
        self._stack.callback(server.close, 0.0)
        return server

    def _slept_s(self) -> float:
        at = self._asleep_at
        return self._counts["slept_s"] + (0.0 if at is None else time.monotonic() - at)

    def _stats(self) -> Mapping[str, Any]:
        return {"placement": "colocated", "sleep": dict(self._counts)}

    def register(self) -> None:
        """Tell hub and run directory of the engine; called once the first version serves."""
        context, engine = self._place.context, self._engine
        info = {
            "url": self._server.url,
            "replica": 0,
            "slots": engine.config.slots,
            "max_len": engine.config.max_len,
            "moves_itself": True,
            "colocated": True,
        }
        self._lease = self._hub.register("engine", NAME, 0, 1, info, context.config.hub.ttl_s)
        row = {"name": NAME, "role": "engine", "pid": os.getpid(), "url": self._server.url}
        write_json(context.run_dir / "proc" / f"{NAME}.json", row)

    def generate(self, pending: Callable[[], bool], timeout_s: float) -> Turn:
        """See ``Neighbour.generate``; ``pending`` says whether this rank has a batch."""
        if self._lease is not None and self._lease.lost.is_set():
            raise PeerError(f"{NAME}: {self._lease.reason}")
        deadline = time.monotonic() + timeout_s
        while not pending():
            if time.monotonic() > deadline:
                return "generate"
            self._step()
        return "train" if self._sleep() else "generate"

    def wake(self, version: Version) -> float:
        """See ``Neighbour.wake``. Compiles every shape the first time."""
        t0 = time.time()
        swapped = self._engine.request_swap(version, functools.partial(self._take, version), 3600.0)
        while not swapped.done():
            self._engine.step()
        report = swapped.result(0)
        if self._mode != "keep":
            self._engine.resume()
        seconds, made = time.time() - t0, self._installed
        assert made is not None
        self._counts["copied_bytes"] += made.copied_bytes
        self._counts["shared_bytes"] += made.shared_bytes
        first = self._asleep_at is None
        self._counts["slept_s"], self._asleep_at = self._slept_s(), None
        answer = swap_answer(
            version,
            pause_s=seconds,
            step=report.step,
            copied=made.copied_bytes,
            shared=made.shared_bytes,
            seconds=seconds,
        )
        if first:  # the first version: nothing stood still for it
            answer = swap_answer(version)
        self._record("swap", t0, t0 + seconds, version=version.number)
        self._installed = None
        self._arrivals.arrived(version, answer)
        return seconds

    def _take(self, version: Version) -> Tree:
        self._installed = self._place.take(version)
        tree: Tree = self._installed.tree
        return tree

    def _step(self) -> None:
        """One engine step, or a short wait where there is nothing to do."""
        t0 = time.time()
        output = self._engine.step()
        self._arrivals.expire()
        if output is None:
            self._engine.wait(_IDLE_S)
        elif output.steps:
            self._spans.busy(t0, time.time())

    def _sleep(self) -> bool:
        """End what needs the old version, pause, and give the thread to the trainer on every rank.

        False when this process is told to stop before that: the engine then goes on to serve.
        """
        freed = None
        while freed is None:
            if not self._stand_still():
                return False
            with contextlib.suppress(EngineError):  # a pinned request slipped in
                freed = self._engine.sleep(release_cache=self._place.release_cache)
        self._spans.flush()
        if self._leader is not None:
            self._leader.turn()
        self._counts["freed_bytes"] += freed
        self._counts["sleeps"] += 1
        self._asleep_at = time.monotonic()
        return True

    def _stand_still(self) -> bool:
        """Whether nobody needs the version any more and the pause mode has taken effect."""
        stop = self._place.context.stop
        self._engine.resume()
        while self._engine.tied and not stop.is_set():
            self._step()
        if self._mode != "keep" and not stop.is_set():
            standing = self._engine.pause(self._mode)
            while not (standing.done() or stop.is_set()):
                self._step()
        return not stop.is_set()

    def leave(self) -> None:
        """See ``Neighbour.leave``. Who waits for samples is refused at once: nobody steps any more."""
        self._arrivals.close()
        if self._lease is not None:
            self._lease.close()
        self._engine.close()
        self._server.close(0.0)
        if self._leader is not None:
            self._leader.close()
        self._engine.sleep(release_cache=True)

    def close(self) -> None:
        """End the server, the engine and the connections."""
        self._stack.close()

    def __enter__(self) -> Lead:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        if error is not None and self._leader is not None:
            self._leader.fail(error)  # told to stop, they would save with a rank that is not there
        self.close()


class Follow:
    """Another rank: executes plans until it is the trainer's turn."""

    def __init__(self, place: Place, world: World) -> None:
        context = place.context
        config, token = context.config, auth.load_token(context.token_file)
        timeout_s = config.run.start_timeout_s
        port = int(world.share({}, timeout_s)["engine_port"])
        assert context.coordinator is not None
        address = f"{context.coordinator.rpartition(':')[0]}:{port}"
        self._place = place
        self._follower = Follower(NAME, world.rank, address, token, lambda: None, timeout_s=timeout_s)
        self._runner = Runner(
            to_decoder(config),
            to_engine(config),
            place.mesh,
            lambda version: place.take(version).tree,
            np.dtype(config.engine.dtype),
        )

    def generate(self, pending: Callable[[], bool], timeout_s: float) -> Turn:
        """See ``Neighbour.generate``; rank 0 alone decides, whatever is ``pending`` here."""
        deadline = time.monotonic() + timeout_s
        while (left := deadline - time.monotonic()) > 0:
            order = self._follower.next_order(left)
            if isinstance(order, StepPlan):
                with self._follower.step():
                    self._runner.execute(order)
            elif order == "turn":
                self._runner.sleep(release_cache=self._place.release_cache)
                return "train"
            elif order == "stop":
                return "stop"
        return "generate"

    def wake(self, version: Version) -> float:
        """Nothing to do: the plan that wakes the engine comes from rank 0."""
        return 0.0

    def leave(self) -> None:
        """Rank 0 says it to all."""
        self._runner.sleep(release_cache=True)

    def close(self) -> None:
        """Leave the group."""
        self._follower.close()

    def __enter__(self) -> Follow:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
