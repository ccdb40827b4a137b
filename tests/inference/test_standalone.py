"""An engine alone in a process of its own, with the openai client in front of it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import jax
import numpy as np
import openai
import pytest
from safetensors.numpy import save_file

from jaxrl_sync.inference.checkpoint import save_trainer
from jaxrl_sync.inference.hf_config import render_config
from jaxrl_sync.inference.tokenizer import CharTokenizer
from jaxrl_sync.sharding.presets.qwen3 import DecoderConfig, trainer_shapes

TOKEN = "feedbeef" * 4
GOLDEN = Path(__file__).parent / "golden" / "qwen3.npz"
CHILD = """
import json, signal, sys, threading
from pathlib import Path
from jaxrl_sync.inference.config import EngineConfig
from jaxrl_sync.inference.server import ServerConfig
from jaxrl_sync.inference.standalone import Standalone, serve_standalone
from jaxrl_sync.sharding.errors import UserError
from jaxrl_sync.sharding.presets.qwen3 import DecoderConfig

spec = json.loads(sys.argv[1])
engine = {k: tuple(v) if isinstance(v, list) else v for k, v in spec["engine"].items()}
stop = threading.Event()
signal.signal(signal.SIGTERM, lambda *_: stop.set())
try:
    serve_standalone(
        Standalone(
            engine=EngineConfig(**engine),
            model=DecoderConfig(**spec["model"]) if "model" in spec else None,
            checkpoint=Path(spec["checkpoint"]) if "checkpoint" in spec else None,
            tokenizer=spec.get("tokenizer"),
            tp=2,
        ),
        token=spec["token"],
        server=ServerConfig(port=spec.get("port", 0)),
        stop=stop,
        announce=lambda url: print(url, flush=True),
    )
except UserError as error:
    print(f"error: {error}", file=sys.stderr)
    sys.exit(error.exit_code)
"""
MODEL = {
    "vocab_size": 100,
    "num_layers": 2,
    "d_model": 32,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 8,
    "d_ff": 48,
}
ENGINE = {"slots": 16, "max_len": 256, "prefill_rows": 8, "deterministic": True}


def start(spec: dict[str, Any]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", CHILD, json.dumps({"token": TOKEN, **spec})],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=2"},
    )


@contextlib.contextmanager
def serving(spec: dict[str, Any]) -> Iterator[str]:
    """The URL of a child process that serves ``spec``; at the end it must leave by itself, with code 0."""
    with start(spec) as child:
        try:
            assert child.stdout is not None
            url = child.stdout.readline().strip()
            assert url.startswith("http://"), child.stderr.read() if child.stderr else ""
            yield url
            child.send_signal(signal.SIGTERM)
            assert child.wait(120) == 0
        finally:
            child.kill()


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with serving({"engine": ENGINE, "model": MODEL}) as url:
        yield url


@pytest.fixture
def client(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key=TOKEN, max_retries=0, timeout=60)


@pytest.mark.slow
def test_conversation_of_two_turns(client: openai.OpenAI) -> None:
    messages: list[Any] = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hello?"},
    ]
    first = client.chat.completions.create(
        model="policy", messages=messages, max_tokens=12, seed=1, logprobs=True
    )
    reply = first.choices[0].message
    assert reply.role == "assistant" and reply.content
    assert first.choices[0].logprobs is not None and first.choices[0].logprobs.content
    assert all(t.logprob < 0 for t in first.choices[0].logprobs.content)
    messages += [{"role": "assistant", "content": reply.content}, {"role": "user", "content": "And now?"}]
    second = client.chat.completions.create(model="policy", messages=messages, max_tokens=8)
    assert first.usage is not None and second.usage is not None
    assert second.usage.prompt_tokens > first.usage.prompt_tokens + len(reply.content)
    assert second.usage.completion_tokens <= 8
    assert second.choices[0].finish_reason in ("stop", "length")


@pytest.mark.slow
def test_streamed_conversation_equals_the_whole_one(client: openai.OpenAI) -> None:
    body: dict[str, Any] = {
        "model": "policy",
        "messages": [{"role": "user", "content": "Tell me."}],
        "max_tokens": 60,
        "seed": 11,
        "extra_body": {"ignore_eos": True, "top_k": 50},
    }
    whole = client.chat.completions.create(**body)
    chunks = list(client.chat.completions.create(**body, stream=True, stream_options={"include_usage": True}))
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole.choices[0].message.content
    assert sum(bool(c.choices and c.choices[0].delta.content) for c in chunks) > 5
    assert chunks[-1].usage == whole.usage
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "length"


@pytest.mark.slow
def test_completions_and_models(client: openai.OpenAI) -> None:
    assert [m.id for m in client.models.list()] == ["policy"]
    assert client.models.retrieve("policy").owned_by == "jaxrl-sync"
    many = client.completions.create(model="policy", prompt=["one", "two"], n=2, max_tokens=4)
    assert [c.index for c in many.choices] == [0, 1, 2, 3]
    parts = list(client.completions.create(model="policy", prompt="one", max_tokens=9, stream=True))
    assert len("".join(p.choices[0].text for p in parts)) <= 9


@pytest.mark.slow
def test_errors_reach_the_client_as_its_own_exceptions(url: str, client: openai.OpenAI) -> None:
    with pytest.raises(openai.AuthenticationError, match="run token"):
        openai.OpenAI(base_url=f"{url}/v1", api_key="wrong", max_retries=0).models.list()
    with pytest.raises(openai.NotFoundError, match="serves 'policy'"):
        client.completions.create(model="gpt", prompt="x")
    with pytest.raises(openai.BadRequestError, match="not enough for 300 of prompt") as caught:
        client.completions.create(model="policy", prompt="x" * 300)
    assert caught.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError, match="tools"):
        client.chat.completions.create(
            model="policy",
            messages=[{"role": "user", "content": "x"}],
            tools=[{"type": "function", "function": {"name": "f"}}],
        )


@pytest.mark.slow
def test_64_concurrent_requests(url: str) -> None:
    """Half streamed, half whole; an answer is the one that its seed gives alone (deterministic mode)."""

    async def ask(client: openai.AsyncOpenAI, seed: int, streamed: bool) -> str:
        body: dict[str, Any] = {
            "model": "policy",
            "messages": [{"role": "user", "content": f"Question {seed}"}],
            "max_tokens": 8 + seed % 24,
            "seed": seed,
        }
        if not streamed:
            return str((await client.chat.completions.create(**body)).choices[0].message.content)
        parts = [c async for c in await client.chat.completions.create(**body, stream=True)]
        return "".join(c.choices[0].delta.content or "" for c in parts)

    async def run() -> tuple[list[str], list[str]]:
        async with openai.AsyncOpenAI(
            base_url=f"{url}/v1", api_key=TOKEN, max_retries=0, timeout=120
        ) as client:
            together = await asyncio.gather(*(ask(client, seed, seed % 2 == 0) for seed in range(64)))
            alone = [await ask(client, seed, False) for seed in range(0, 64, 9)]
        return list(together), alone

    together, alone = asyncio.run(run())
    assert len(together) == 64 and len(set(together)) > 60
    assert together[::9] == alone
    stats = httpx.get(f"{url}/stats", headers={"Authorization": f"Bearer {TOKEN}"}).json()
    assert stats["running"] == stats["waiting"] == 0 and stats["samples_finished"] >= 72


@pytest.mark.slow
def test_checkpoint_is_served_with_the_tokens_that_transformers_gives(tmp_path: Path) -> None:
    """Published names, shapes and RoPE end to end: greedy tokens equal those recorded from transformers."""
    with np.load(GOLDEN) as file:
        arrays = {k.removeprefix("untied/"): file[k] for k in file.files if k.startswith("untied/")}
    cfg = DecoderConfig(**json.loads(str(arrays["config"])))
    weights = {k.removeprefix("weights/"): v for k, v in arrays.items() if k.startswith("weights/")}
    save_file(weights, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(render_config(cfg, "float16", 64)))
    engine = {"slots": 4, "max_len": 32, "prefill_lengths": [16]}
    with serving({"engine": engine, "checkpoint": str(tmp_path), "tokenizer": "char:0123456789"}) as url:
        client = openai.OpenAI(base_url=f"{url}/v1", api_key=TOKEN, max_retries=0, timeout=60)
        extra = {"ignore_eos": True, "return_token_ids": True}
        answer = client.completions.create(
            model="policy",
            prompt=arrays["tokens"].tolist(),
            max_tokens=8,
            temperature=0,
            extra_body=extra,
        )
        found = [c.model_extra["token_ids"] for c in answer.choices if c.model_extra]
        version = httpx.get(f"{url}/health").json()["version"]
    assert found == arrays["greedy"][:, 12:].tolist()
    assert version == {"lineage": tmp_path.name, "number": 0}


@pytest.mark.slow
def test_saved_policy_is_served_with_its_own_tokenizer_and_template(tmp_path: Path) -> None:
    cfg = DecoderConfig(24, 2, 32, 4, 2, 8, 48)
    rng = np.random.default_rng(0)
    shapes = trainer_shapes(cfg)
    tree = jax.tree.map(lambda s: rng.normal(scale=0.3, size=s.shape).astype(np.float32), shapes)
    folder = tmp_path / "policy"
    save_trainer(folder, tree, cfg, eos_ids=(2,), tokenizer=CharTokenizer("0123456789+=", size=24))
    (folder / "chat_template.jinja").write_text(
        "{% for m in messages %}{{ m.content }}{% endfor %}={{ tail }}"
    )
    with serving({"engine": {"slots": 4, "max_len": 32}, "checkpoint": str(folder)}) as url:
        client = openai.OpenAI(base_url=f"{url}/v1", api_key=TOKEN, max_retries=0, timeout=60)
        shared: dict[str, Any] = {"model": "policy", "max_tokens": 12, "temperature": 0}
        messages: list[Any] = [{"role": "user", "content": "12+"}, {"role": "user", "content": "30"}]
        variables = {"chat_template_kwargs": {"tail": "0"}}
        chat = client.chat.completions.create(**shared, messages=messages, extra_body=variables)
        plain = client.completions.create(**shared, prompt="12+30=0")
        with pytest.raises(openai.BadRequestError, match="can't encode"):
            client.completions.create(**shared, prompt="x")
    assert chat.usage is not None and chat.usage.prompt_tokens == 7
    assert chat.choices[0].message.content == plain.choices[0].text
    assert chat.system_fingerprint == "policy:0"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "code", "words"),
    [
        ("port", 3, "Address already in use"),
        ({"checkpoint": "/nowhere"}, 3, "/nowhere/config.json is missing"),
        ({"tokenizer": "/nowhere"}, 2, "no tokenizer at /nowhere"),
        ({"model": {**MODEL, "vocab_size": 50}}, 2, "tokenizer has 99 ids, the model's vocab_size is 50"),
    ],
)
def test_start_that_can_not_be_is_one_line(change: Any, code: int, words: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        change = {"port": taken.getsockname()[1]} if change == "port" else change
        child = start({"engine": ENGINE, "model": MODEL, **change})
        _, errors = child.communicate(timeout=240)
    assert child.returncode == code
    assert words in errors and errors.startswith("error: ") and errors.count("\n") == 1
