"""Plain synchronous GRPO in one process, on which density is measured: sample, score, train."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from jaxrl_sync.batch.frame import BatchFrame, BatchHeader, decode_batch, encode_batch
from jaxrl_sync.batch.pack import PackConfig, pack
from jaxrl_sync.batch.rollout import Episode, Group, Reward, Sample, Turn
from jaxrl_sync.config import RunConfig
from jaxrl_sync.config.convert import to_decoder, to_engine
from jaxrl_sync.inference.engine import Engine
from jaxrl_sync.inference.process import engine_convert
from jaxrl_sync.inference.request import GroupResult, Request, Sampling
from jaxrl_sync.inference.runner import target_tree
from jaxrl_sync.orchestrator.advantages import group_advantages
from jaxrl_sync.trainer import state as train_state
from jaxrl_sync.trainer.axes import make_mesh
from jaxrl_sync.trainer.settings import loss_config, trainer_config
from jaxrl_sync.trainer.trainer import Trainer
from jaxrl_sync.transfer.version import Version

Prompt = Sequence[int]
Score = Callable[[int, Sequence[int]], float]


class GrpoLoop:
    """Owns a trainer and an engine on one device each; ``step`` is one update on fresh samples."""

    def __init__(self, config: RunConfig, params: Any | None = None) -> None:
        """``params``: a trainer tree to start from, random weights without; it is donated."""
        self.config, self.model = config, to_decoder(config)
        settings = trainer_config(config)
        mesh = make_mesh(settings.mesh, jax.devices()[:1])
        state = (
            train_state.create(self.model, settings, mesh, config.run.seed)
            if params is None
            else train_state.from_params(self.model, settings, mesh, params, config.run.seed)
        )
        self.trainer = Trainer(self.model, settings, loss_config(config), mesh, state)
        self.engine_config = to_engine(config)
        self._mesh = Mesh(np.array(jax.devices()[:1]), ("tp",), axis_types=(AxisType.Auto,))
        self._dtype = np.dtype(config.engine.dtype)
        self.engine = Engine(self.engine_config, self.model, self._mesh, dtype=self._dtype)
        self._convert = jax.jit(engine_convert(self.model, self.engine_config, 1, config.engine.dtype))
        self.updates = 0

    def step(self, prompts: Sequence[Prompt], score: Score, stop: Sequence[int]) -> dict[str, float]:
        """Samples a group per prompt, trains on them; ``score(prompt number, tokens)``. The metrics."""
        self._install()
        s = self.config.loop.sampling
        sampling = Sampling(s.temperature, s.top_k, s.top_p, s.max_tokens, tuple(stop))
        requests = [
            Request(f"{self.updates}-{i}", tuple(p), self.config.loop.group_size, sampling)
            for i, p in enumerate(prompts)
        ]
        handles = [self.engine.submit(r) for r in requests]
        while not all(h.future.done() for h in handles):
            self.engine.step()
        samples, rewards = [], []
        for i, (request, handle) in enumerate(zip(requests, handles, strict=True)):
            group = self._group(i, request, handle.result(0), score)
            rewards += [float(r) for r in group.rewards]
            advantages = group_advantages(list(group.rewards), normalize_std=self.config.loss.normalize_std)
            samples += list(group.samples(advantages))
        metrics = self.trainer.train(self._frame(samples))
        self.updates += 1
        return metrics | {"reward": float(np.mean(rewards))}

    def _install(self) -> None:
        target = target_tree(self.model, self.engine_config, self._mesh, self._dtype)
        tree = self._convert(self.trainer.params)
        tree = jax.tree.map(lambda x, t: jax.device_put(x, t.sharding), tree, target)
        done = self.engine.install(tree, Version("density", self.updates))
        while not done.done():
            self.engine.step()
        done.result(0)

    def _group(self, number: int, request: Request, result: GroupResult, score: Score) -> Group:
        episodes = []
        for index, s in enumerate(result.samples):
            turn = Turn(
                prompt=np.asarray(request.prompt, np.int32),
                tokens=np.asarray(s.tokens, np.int32),
                logprobs=np.asarray(s.logprobs, np.float32),
                versions=np.asarray(s.versions, np.int32),
                finish_reason=s.finish_reason,
            )
            reward = Reward(score(number, s.tokens))
            key, uid = request.request_id, str(number)
            episodes.append(Episode(uid, key, index, "density", self.updates, (turn,), reward))
        return Group(request.request_id, str(number), len(episodes), self.updates, tuple(episodes))

    def _frame(self, samples: list[Sample]) -> BatchFrame:
        t = self.config.trainer
        packed = pack(samples, PackConfig(1, t.rows, t.seq_len, overlong="truncate"))
        header = BatchHeader(
            self.updates + 1, 0, packed.micro_batches, t.rows, t.seq_len, packed.num_valid_tokens
        )
        return decode_batch(encode_batch(header, packed.for_rank(0)))
