"""An engine alone: weights from a checkpoint or at random, an HTTP server, no hub and no trainer.

``jaxrl-sync engine CONFIG --checkpoint DIR`` calls ``serve_standalone``: it takes the port, answers
``GET /health`` while it loads and compiles, serves until it is told to stop, and drains.
"""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from jaxrl_sync.inference.chat import chat_format
from jaxrl_sync.inference.checkpoint import load_engine, read_config
from jaxrl_sync.inference.config import EngineConfig, EngineConfigError
from jaxrl_sync.inference.engine import Engine
from jaxrl_sync.inference.engine_thread import EngineThread
from jaxrl_sync.inference.errors import EngineError
from jaxrl_sync.inference.front import SwapReport
from jaxrl_sync.inference.openai_api import OpenAIModel
from jaxrl_sync.inference.server import EngineServer, ServerConfig
from jaxrl_sync.inference.tokenizer import Tokenizer, load_tokenizer
from jaxrl_sync.sharding.presets.quantized import quantize_tree
from jaxrl_sync.sharding.presets.qwen3 import DecoderConfig, Tree, engine_abstract
from jaxrl_sync.transfer.version import Version

# Compiling every shape of a large model on a slow machine; until then health says "starting".
START_DEADLINE_S = 1800.0
DRAIN_S = 10.0
INIT_STD = 0.02


@dataclasses.dataclass(frozen=True)
class Standalone:
    """What one standalone engine serves.

    model: the decoder for random weights; a checkpoint's own ``config.json`` replaces it.
    checkpoint: folder of the weights; None makes random ones from ``engine.seed``.
    tokenizer: a ``load_tokenizer`` spec; None takes the checkpoint's, or printable ASCII without one.
    tp: devices to shard over, the first ones of this process. dtype: of the weights.
    """

    engine: EngineConfig
    model: DecoderConfig | None = None
    checkpoint: Path | None = None
    tokenizer: str | None = None
    tp: int = 1
    dtype: str = "float32"
    model_name: str = "policy"


def serve_standalone(
    spec: Standalone,
    *,
    token: str,
    server: ServerConfig | None = None,
    stop: threading.Event,
    announce: Callable[[str], None],
    drain_s: float = DRAIN_S,
) -> None:
    """Serves until ``stop`` is set, then drains and returns. ``announce`` gets the URL once weights serve.

    Blocks. Raises UserError: PortInUseError (exit code 3), CheckpointError, TokenizerError,
    EngineConfigError; and whatever ends the engine.
    """
    model, tokenizer, engine_config = resolve(spec)
    mesh = _mesh(spec.tp)
    chat = chat_format(tokenizer)
    openai = OpenAIModel(spec.model_name, engine_config, model.vocab_size, tokenizer, chat)
    engine = Engine(engine_config, model, mesh, dtype=np.dtype(spec.dtype), warm_up=True)
    try:
        with EngineServer(engine, token=token, config=server, openai=openai) as http:
            with EngineThread(engine) as thread:
                installed = engine.install(_weights(spec, model, mesh), Version(_lineage(spec), 0))
                if _wait(installed, thread, stop):
                    announce(http.url)
                while not stop.wait(0.2):
                    thread.check()
                http.close(drain_s)
    finally:
        engine.close()
        chat.close()


def resolve(spec: Standalone) -> tuple[DecoderConfig, Tokenizer, EngineConfig]:
    """The decoder, the tokenizer, and the engine's config with all end-of-sequence ids. Raises UserError."""
    published = read_config(spec.checkpoint) if spec.checkpoint is not None else None
    model = published.decoder if published else spec.model
    if model is None:
        raise EngineConfigError("neither a model nor a checkpoint to serve")
    tokenizer = load_tokenizer(_tokenizer_spec(spec), None)
    if tokenizer.vocab_size > model.vocab_size:
        raise EngineConfigError(
            f"tokenizer has {tokenizer.vocab_size} ids, the model's vocab_size is {model.vocab_size}"
        )
    if published and spec.engine.max_len > published.max_position:
        raise EngineConfigError(
            f"engine.max_len: expected <= {published.max_position} (max_position_embeddings), "
            f"got {spec.engine.max_len}"
        )
    listed = published.eos_ids if published else ()
    ends = tuple(dict.fromkeys((*spec.engine.eos_token_ids, *tokenizer.eos_ids, *listed)))
    config = dataclasses.replace(
        spec.engine,
        eos_token_ids=ends,
        max_stop_ids=max(spec.engine.max_stop_ids, len(ends) + 4),
        version_probe=False,
    )
    return model, tokenizer, config


def random_weights(model: DecoderConfig, mesh: Mesh, dtype: Any, seed: int) -> Tree:
    """An engine tree on ``mesh``: norms 1, everything else normal with standard deviation 0.02."""
    abstract = engine_abstract(model, mesh, np.dtype(dtype))
    leaves, treedef = jax.tree.flatten(abstract)

    def make() -> list[jax.Array]:
        keys = jax.random.split(jax.random.key(seed), len(leaves))
        return [
            jax.numpy.ones(x.shape, x.dtype)
            if len(x.shape) == 1
            else (INIT_STD * jax.random.normal(k, x.shape)).astype(x.dtype)
            for k, x in zip(keys, leaves, strict=True)
        ]

    made = jax.jit(make, out_shardings=[x.sharding for x in leaves])()
    tree: Tree = jax.tree.unflatten(treedef, made)
    return tree


def _wait(installed: Future[SwapReport], thread: EngineThread, stop: threading.Event) -> bool:
    """Whether the weights serve; False when told to stop before. Raises EngineError at the deadline."""
    end = time.monotonic() + START_DEADLINE_S
    while not installed.done():
        if stop.wait(0.05):
            return False
        thread.check()
        if time.monotonic() > end:
            raise EngineError(f"engine did not start within {START_DEADLINE_S:g} s")
    installed.result(0)
    return True


def _weights(spec: Standalone, model: DecoderConfig, mesh: Mesh) -> Tree:
    if spec.checkpoint is not None:
        tree = load_engine(spec.checkpoint, model, mesh, spec.dtype)
    else:
        tree = random_weights(model, mesh, spec.dtype, spec.engine.seed)
    scheme = spec.engine.quantization
    return tree if scheme is None else quantize_tree(tree, scheme, mesh.shape["tp"])


def _tokenizer_spec(spec: Standalone) -> str:
    if spec.tokenizer is not None:
        return spec.tokenizer
    return str(spec.checkpoint) if spec.checkpoint is not None else "char"


def _lineage(spec: Standalone) -> str:
    return spec.checkpoint.resolve().name if spec.checkpoint is not None else "random"


def _mesh(tp: int) -> Mesh:
    devices = jax.devices()
    if tp > len(devices):
        raise EngineConfigError(f"engine.devices: {tp} asked for, this process has {len(devices)}")
    return Mesh(np.array(devices[:tp]), ("tp",), axis_types=(AxisType.Auto,))
