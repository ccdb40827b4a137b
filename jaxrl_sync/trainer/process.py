"""The trainer process: one rank of the trainer world, from the first weights to the last acknowledgement.

Steps of ``run``: join the world; restore a checkpoint, or make the first weights (with the supervised warm-up
that the config asks for); compile; publish that version; listen for batches and say so to the hub; then, per
batch: agree on the step with the other ranks, stages, update, publish, checkpoint where asked, acknowledge.
Nothing delays the update but ``Publisher.publish``, whose time is reported as stall.
"""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxrl_sync.batch.connection import Ack, BatchReceiver, TrainerState
from jaxrl_sync.batch.frame import BatchFrame, BatchHeader
from jaxrl_sync.config.convert import to_decoder, to_engine
from jaxrl_sync.config.process import PeerError, ProcessContext, Timeline
from jaxrl_sync.inference.checkpoint import load_trainer
from jaxrl_sync.inference.probe import STAMP, source_shape
from jaxrl_sync.inference.process import engine_convert
from jaxrl_sync.sharding.layout import Layout
from jaxrl_sync.sharding.presets.qwen3 import DecoderConfig
from jaxrl_sync.trainer import state as train_state
from jaxrl_sync.trainer.axes import Tree, make_mesh, replicated
from jaxrl_sync.trainer.checkpoint import Checkpoints, Meta
from jaxrl_sync.trainer.colocated import Follow, Lead, Neighbour, Place
from jaxrl_sync.trainer.config import OptimizerConfig, validate_loss
from jaxrl_sync.trainer.density import DensityLog
from jaxrl_sync.trainer.publishing import Publishes, open_publishers
from jaxrl_sync.trainer.settings import loss_config, trainer_config
from jaxrl_sync.trainer.sft import supervised
from jaxrl_sync.trainer.state import TrainState
from jaxrl_sync.trainer.trained import frozen, with_fresh_adapters
from jaxrl_sync.trainer.trainer import Trainer
from jaxrl_sync.trainer.world import World, WorldError
from jaxrl_sync.transfer import auth
from jaxrl_sync.transfer.hub.client import HubClient, Lease
from jaxrl_sync.transfer.tls import ServerTls
from jaxrl_sync.transfer.version import Version, new_lineage

logger = logging.getLogger("jaxrl_sync.trainer")

_WAIT_S = 0.5

Source = Callable[[int], Tree]
"""From a version number to the tree that is published under it."""


def run(context: ProcessContext, tls: ServerTls | None = None) -> None:
    """Play one rank of the trainer until the run's last step is consumed or ``context.stop`` is set.

    Raises a ``UserError`` with the named cause: a peer, the hub or the orchestrator lost, ranks that
    disagree, a checkpoint that is missing or does not fit. ``tls``: the certificate that a colocated engine's
    server answers with.
    """
    validate_loss(context.config.loop.staleness_bound, loss_config(context.config))
    with contextlib.ExitStack() as stack:
        timeline = context.open_timeline()
        stack.callback(timeline.close)
        lease = _register(context, stack)
        world = stack.enter_context(
            World(
                context.rank,
                context.world_size,
                context.coordinator,
                timeout_s=context.config.run.start_timeout_s,
            )
        )
        folder = context.run_dir / "checkpoints"
        checkpoints = stack.enter_context(Checkpoints(folder, context.config.trainer.checkpoint_keep))
        try:
            trainer, meta = start(context, world, checkpoints, timeline)
            seconds = trainer.warm_up(_barrier(context, world, "the first update"))
            logger.info("%s: version %s, compiled in %.1f s", context.name, meta.version, seconds)
            _serve(context, world, checkpoints, timeline, trainer, meta, lease, stack, tls)
        except jax.errors.JaxRuntimeError as error:
            if world.size == 1:
                raise
            raise WorldError(
                f"trainer rank {world.rank} of {world.size}: a collective failed: a peer is gone or stuck: "
                f"{str(error)[:500]}"
            ) from error


def _register(context: ProcessContext, stack: contextlib.ExitStack) -> Lease:
    """This process's lease at the hub, from its start on: who waits for it learns that it has died."""
    config = context.config
    url = context.wait_hub(config.run.start_timeout_s)
    hub = stack.enter_context(HubClient(url, context.token_file, config.run.start_timeout_s))
    size, ttl_s = context.world_size, config.hub.ttl_s
    return stack.enter_context(hub.register("trainer", context.name, context.rank, size, ttl_s=ttl_s))


def _barrier(context: ProcessContext, world: World, what: str) -> Callable[[], object]:
    """Where all ranks meet before ``what``; compilation may take each of them ``start_timeout_s``."""
    return lambda: world.gather({"before": what}, context.config.run.start_timeout_s)


def start(
    context: ProcessContext, world: World, checkpoints: Checkpoints, timeline: Timeline
) -> tuple[Trainer, Meta]:
    """The trainer at its first version: version 0, or a checkpoint's in a lineage of its own."""
    config, model = context.config, to_decoder(context.config)
    settings, loss = trainer_config(config), loss_config(config)
    mesh = make_mesh(settings.mesh)
    lineage = world.share({"lineage": new_lineage()}, config.run.start_timeout_s)["lineage"]
    if context.resume:
        target = train_state.abstract(model, settings, mesh)
        wanted = target.params if loss.needs_reference else None
        state, saved, reference = checkpoints.restore(target, reference=wanted)
        checkpoints.drop_after(saved.version.number, _barrier(context, world, "later checkpoints go"))
        meta = Meta(Version(lineage, saved.version.number), saved.version, saved.cursor)
    else:
        state = _first_state(context, world, model, mesh)
        reference = state.params if loss.needs_reference else None
        meta = Meta(Version(lineage, 0), None, {})
    trainer = Trainer(model, settings, loss, mesh, state, reference, timeline.record)
    return trainer, meta


def _first_state(
    context: ProcessContext, world: World, model: DecoderConfig, mesh: jax.sharding.Mesh
) -> TrainState:
    """Random weights or those of ``model.checkpoint``, after the supervised warm-up if there is one."""
    config, settings = context.config, trainer_config(context.config)
    if config.model.checkpoint is None:
        state = train_state.create(model, settings, mesh, config.run.seed)
    else:
        wanted = train_state.abstract(model, settings, mesh).params
        params = load_trainer(Path(config.model.checkpoint), model, frozen(wanted, model) or wanted)
        if model.lora is not None:
            params = with_fresh_adapters(params, model, settings, mesh, config.run.seed)
        state = train_state.from_params(model, settings, mesh, params, config.run.seed)
    t = config.trainer
    if not t.sft_steps:
        return state
    from jaxrl_sync.tasks.mixture import make_mixture

    mixture = make_mixture(config.task)
    size = config.loop.prompts_per_step * config.loop.group_size
    examples = mixture.sft_examples(t.sft_steps * size, config.task.seed)
    if not examples:
        names = ", ".join(mixture.labels)
        raise WorldError(f"trainer.sft_steps={t.sft_steps}, but task {names} has no demonstrations")
    samples = [example.sample() for example in examples]
    per = max(1, len(samples) // t.sft_steps)
    batches = [samples[i * per : (i + 1) * per] for i in range(t.sft_steps)]
    optimizer = OptimizerConfig(learning_rate=t.sft_learning_rate, beta1=t.beta1, beta2=t.beta2, eps=t.eps)
    barrier = _barrier(context, world, "the warm-up")
    state, curve = supervised(model, settings, mesh, state, [b for b in batches if b], optimizer, barrier)
    logger.info("%s: warm-up of %d updates, nll %.3f -> %.3f", context.name, len(curve), curve[0], curve[-1])
    return state


def _serve(
    context: ProcessContext,
    world: World,
    checkpoints: Checkpoints,
    timeline: Timeline,
    trainer: Trainer,
    meta: Meta,
    lease: Lease,
    stack: contextlib.ExitStack,
    tls: ServerTls | None,
) -> None:
    """Publish the first version, open the data connection, tell the hub of it, loop."""
    config = context.config
    token, hub_url = auth.load_token(context.token_file), context.wait_hub(config.run.start_timeout_s)
    source = stamped_source(trainer) if config.engine.version_probe else plain_source(trainer)
    convert = engine_convert(
        to_decoder(config),
        to_engine(config),
        config.engine.processes * config.engine.devices,
        config.engine.dtype,
    )
    layout = Layout.of(source(meta.version.number))
    publisher = open_publishers(context, stack, hub_url, layout, convert, meta.version.lineage)
    loop = Loop(world, trainer, publisher, source, checkpoints, timeline, meta, config.sync.every_steps)
    loop.offloads = config.trainer.offload == "optimizer"
    if config.sync.density_every_steps:
        path = context.run_dir / "density.jsonl"
        loop.density = DensityLog(path, config.sync.density_every_steps, convert)
    loop.publish(meta.version.number)
    lead = None
    if config.engine.placement != "disaggregated":
        place = Place.of(context, source)
        if world.rank == 0:
            loop.neighbour = lead = stack.enter_context(Lead(place, world, hub_url, tls))
        else:
            loop.neighbour = stack.enter_context(Follow(place, world))
        loop.wake()
    version = meta.version
    receiver = stack.enter_context(
        BatchReceiver(
            TrainerState(version.lineage, version.number, meta.cursor),
            token=token,
            run_id=auth.run_id_of(token),
            data_rank=trainer.data_rank,
            host=config.run.host,
        )
    )
    lease.update(
        data_url=receiver.address_towards(hub_url),
        data_rank=trainer.data_rank,
        data_ranks=trainer.data_ranks,
        rows=trainer.rows,
        seq_len=trainer.config.seq_len,
    )
    context.announce()
    if lead is not None:
        lead.register()
    loop.run(context, receiver, lease)


def plain_source(trainer: Trainer) -> Source:
    """What is published: the live masters."""
    return lambda number: trainer.params


def stamped_source(trainer: Trainer) -> Source:
    """The live masters with a version stamp, which the engines' version probe reads in every forward pass."""
    mesh = trainer.step.mesh
    shape = source_shape(trainer.step.model).shape

    def source(number: int) -> Tree:
        def filled(_: Any) -> Any:
            return np.full(shape, number, np.int32)

        return trainer.params | {STAMP: jax.make_array_from_callback(shape, replicated(mesh), filled)}

    return source


class Loop:
    """Batches in, versions out, for one rank. ``meta`` is what is committed; used by one thread."""

    def __init__(
        self,
        world: World,
        trainer: Trainer,
        publisher: Publishes,
        source: Source,
        checkpoints: Checkpoints | None,
        timeline: Timeline,
        meta: Meta,
        publish_every: int = 1,
    ) -> None:
        self._world, self._trainer, self._publisher = world, trainer, publisher
        self._source = source
        self._checkpoints, self._timeline = checkpoints, timeline
        self._publish_every = publish_every
        self.density: DensityLog | None = None
        self.neighbour: Neighbour | None = None
        """A colocated engine: it has this thread while there is no batch."""
        self.offloads = False
        self.meta = meta
        self._dismissed = False
        self._saved = meta.version.number if meta.parent is not None else -1

    def run(self, context: ProcessContext, receiver: BatchReceiver, lease: Lease) -> None:
        """Until ``context.stop``: then what is committed and not yet saved is saved.

        After the last batch it goes on answering and publishing: engines and the last evaluation need it.
        """
        section = context.config.run
        wait_s, began, finished = section.start_timeout_s + section.stuck_timeout_s, time.time(), False
        trained = False
        while not self._over(context.stop.is_set()):
            if lease.lost.is_set():
                raise PeerError(f"{context.name}: {lease.reason}")
            try:
                frame = self._next(receiver, section.stuck_timeout_s)
            except ConnectionError as error:
                if finished:
                    break
                raise PeerError(f"{context.name}: {error}") from error
            if frame is None:
                if not trained and time.time() - began > wait_s:
                    raise PeerError(f"{context.name}: no batch within {wait_s:g} s of the start")
                continue
            self._timeline.record("wait", began, time.time(), step=frame.header.step)
            if self._agree(frame.header, context.stop.is_set(), section.stuck_timeout_s):
                break
            receiver.commit(self.advance(frame, time.time() - began), frame.header.cursor)
            trained, finished, began = True, frame.header.last, time.time()
        self._leave()

    def _over(self, stop: bool) -> bool:
        """Whether to leave. Ranks beside rank 0's engine leave when it says so: a step may be on its way."""
        return self._dismissed if self.neighbour is not None and self._world.rank > 0 else stop

    def _next(self, receiver: BatchReceiver, timeout_s: float) -> BatchFrame | None:
        """The next batch if it comes within about ``_WAIT_S``; meanwhile a colocated engine generates."""
        if self.neighbour is None:
            return receiver.receive(_WAIT_S)
        turn = self.neighbour.generate(receiver.pending, _WAIT_S)
        self._dismissed = turn == "stop"
        if turn != "train":
            return None
        frame = receiver.receive(timeout_s)
        if frame is None:
            raise PeerError(
                f"trainer-{self._world.rank}: rank 0 has a batch, none came within {timeout_s:g} s"
            )
        return frame

    def wake(self) -> float:
        """It is the engine's turn; seconds that this kept the thread, 0 without one."""
        if self.neighbour is None:
            return 0.0
        if self.offloads:
            self._trainer.offload()
        return self.neighbour.wake(self.meta.version)

    def _agree(self, header: BatchHeader, stop: bool, timeout_s: float) -> bool:
        """Whether some rank drains; ``WorldError`` unless all others hold the same step."""
        word = {
            "step": header.step,
            "micro_batches": header.micro_batches,
            "num_valid_tokens": header.num_valid_tokens,
            "checkpoint": header.checkpoint,
        }
        words = self._world.gather({**word, "stop": stop}, timeout_s)
        if any(w["stop"] for w in words):
            return True
        check_same_step(words)
        return False

    def _leave(self) -> None:
        """Tell ranks that wait for this one that it drains, and see what is committed saved."""
        if self.neighbour is not None:
            self.neighbour.leave()
        self._world.say({"stop": True})
        if self.meta.version.number > max(self._saved, 0):
            self.save()
        if self._checkpoints is not None:
            self._checkpoints.wait()

    def advance(self, frame: BatchFrame, waited_s: float) -> Ack:
        """Train on one batch, publish the version, save it where asked; the acknowledgement."""
        header = frame.header
        expected = self.meta.version.number + 1
        if header.step != expected:
            raise WorldError(f"batch of step {header.step}, expected {expected}")
        self._trainer.reload()
        metrics = self._trainer.train(frame)
        version = Version(self.meta.version.lineage, header.step)
        self.meta = Meta(version, self.meta.parent, header.cursor)
        metrics["wait_s"], metrics["publish_s"] = waited_s, 0.0
        if header.step % self._publish_every == 0 or header.last:
            metrics["publish_s"] = self.publish(header.step)
        if self.density is not None:
            self.density.observe(header.step, self._source(header.step))
        metrics["checkpoint_s"] = self.save() if header.checkpoint else 0.0
        metrics["wake_s"] = self.wake()
        return Ack(header.step, version.lineage, version.number, finite(metrics))

    def publish(self, number: int) -> float:
        """Hand the live weights to the publisher; seconds that it kept this thread (the stall)."""
        t0 = time.time()
        self._publisher.publish(self._source(number), self.meta.version)
        t1 = time.time()
        self._timeline.record("publish", t0, t1, step=number, version=number)
        return t1 - t0

    def save(self) -> float:
        """Begin a checkpoint of the committed version with its cursor; seconds that this thread was kept."""
        if self._checkpoints is None:
            return 0.0
        t0 = time.time()
        self._trainer.reload()
        self._checkpoints.save(self._trainer.state, self.meta, self._trainer.reference)
        self._saved = self.meta.version.number
        t1 = time.time()
        self._timeline.record("checkpoint", t0, t1, version=self._saved)
        return t1 - t0


def check_same_step(words: list[dict[str, Any]]) -> None:
    """Raise ``WorldError`` naming the ranks whose frames differ from rank 0's."""
    for rank, word in enumerate(words):
        if word != words[0]:
            raise WorldError(f"trainer ranks hold different batches: rank 0 {words[0]}, rank {rank} {word}")


def finite(metrics: dict[str, float]) -> dict[str, float]:
    """``metrics`` without what JSON cannot carry, and how many were left out."""
    kept = {name: float(value) for name, value in metrics.items() if math.isfinite(value)}
    return {**kept, "nonfinite_metrics": float(len(metrics) - len(kept))}
