"""Planning on paper: catalog, command line, relays, scale."""

from __future__ import annotations

import functools
import json
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from jaxrl_sync.sharding import MappingError, plan, trace
from jaxrl_sync.sharding.cli import main, paper_source, paper_target
from jaxrl_sync.sharding.command_line import UsageError
from jaxrl_sync.sharding.paper import PaperMesh
from jaxrl_sync.sharding.presets import family
from jaxrl_sync.sharding.presets.catalog import MODELS, model
from jaxrl_sync.sharding.relays import relay

PLAN_SCALE = Path(__file__).parents[2] / "experiments" / "plan_scale" / "run.py"


@pytest.mark.parametrize(
    ("name", "billions"),
    [("llama-3.1-8b", 8.0), ("llama-3.1-70b", 70.6), ("qwen3-0.6b", 0.75), ("qwen3-30b-a3b", 30.5),
     ("qwen3-235b-a22b", 235.1), ("deepseek-v3", 671.0), ("kimi-k2", 1026.0)],
)  # fmt: skip
def test_published_models_have_their_published_sizes(name: str, billions: float) -> None:
    assert model(name).num_params / 1e9 == pytest.approx(billions, rel=0.01)


def test_kimi_has_69120_expert_tensors() -> None:
    cfg = MODELS["kimi-k2"]
    assert cfg.expert_layers * cfg.num_experts * 3 == 69_120


def test_command_line_prints_report_replicas_and_explanation(capsys: pytest.CaptureFixture[str]) -> None:
    words = "--model qwen3-0.6b --source fsdp=16 --target tp=8 --replicas 4 --explain layers/3/qkv --gbit 100"
    assert main(words.split()) == 0
    out = capsys.readouterr().out
    assert "redundancy 1.000" in out
    assert "4 engines of 1 nodes from 2 trainer nodes" in out
    assert "layers/3/qkv: bfloat16[1024, 8, 4, 128], cast" in out


def test_command_line_holds_the_prediction_beside_published_numbers(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main("--model qwen3-0.6b --source fsdp=16 --target tp=8 --gbit 100".split()) == 0
    out = capsys.readouterr().out
    found = re.search(r"predicted (\S+) s, \S+ of the bound (\S+) s", out)
    assert found is not None
    predicted, bound = float(found[1]), float(found[2])
    received = re.search(r"received per node: ([0-9,]+) to", out)
    assert received is not None  # 8 NICs of 100 Gb/s at the one node that receives
    assert predicted == pytest.approx(int(received[1].replace(",", "")) / (8 * 100e9 / 8), rel=1e-3)
    beside = re.search(
        r"GPUs in FP8: 1.3 s; this plan from 16 to 8: (\S+) s, (\S+) s if it travelled in FP8", out
    )
    assert beside is not None and float(beside[1]) == predicted
    assert float(beside[2]) == pytest.approx(predicted / 2, rel=1e-3)
    over = re.search(r"1.18 to 2.12 times the bound: that would be (\S+) to (\S+) s", out)
    assert over is not None
    assert [float(x) for x in over.groups()] == pytest.approx([1.18 * bound, 2.12 * bound], rel=1e-3)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--model qwen4 --source fsdp=2 --target tp=2", "unknown model 'qwen4'"),
        ("--model qwen3-0.6b --source fsdp --target tp=2", "expected NAME=SIZE"),
        ("--model qwen3-0.6b --source fsdp=2 --target pp=2", "unknown axis 'pp'"),
        ("--model qwen3-0.6b --source fsdp=2 --target tp=2 --explain nope", "no tensor 'nope'"),
        ("--model qwen3-0.6b --source fsdp=\u00b2 --target tp=2", "expected NAME=SIZE"),
        ("--model qwen3-0.6b --source fsdp=9999999999 --target tp=2", "has 9,999,999,999 devices"),
        ("--model qwen3-0.6b --source fsdp=2 --target tp=2 --dtype foo", "unknown dtype 'foo'"),
        ("--model qwen3-0.6b --source fsdp=2 --target tp=2 --dtype O", "no number type of jax"),
        ("--model qwen3-0.6b --source fsdp=2 --target tp=2 --dtype float64", "jax has no float64"),
    ],
)
def test_bad_command_lines_are_one_clear_line(
    words: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words.split()) == 2
    err = capsys.readouterr().err
    assert said in err and err.count("\n") == 1


@pytest.mark.parametrize("option", ["devices-per-node", "nics-per-node", "gbit", "replicas"])
@pytest.mark.parametrize("value", ["0", "-1", "x", "\u00b2"])
def test_counts_are_whole_numbers_from_1_on(option: str, value: str) -> None:
    words = ["--model", "qwen3-0.6b", "--source", "fsdp=2", "--target", "tp=2", f"--{option}={value}"]
    with pytest.raises(UsageError, match=f"--{option}: expected a whole number from 1 on, found '{value}'"):
        main(words)


@pytest.mark.parametrize(("file", "said"), [("none/x.png", "No such file"), ("x.nope", "Format 'nope'")])
def test_a_picture_that_cannot_be_written_is_one_line(
    file: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = "--model qwen3-0.6b --source fsdp=2 --target tp=2 --figure".split()
    assert main([*words, str(tmp_path / file)]) == 1
    err = capsys.readouterr().err
    assert err.startswith("jaxrl-sync: error: --figure ") and said in err and err.count("\n") == 1


def test_expert_parallel_targets_hold_their_own_experts_only() -> None:
    cfg = family.FamilyConfig(64, 2, 64, 4, 2, 16, 96, num_dense_layers=1, num_experts=8, d_expert=32)
    source = paper_source(cfg, PaperMesh.parse("fsdp=16"))
    corr = trace(functools.partial(family.convert, cfg=cfg), source)
    target = paper_target(cfg, PaperMesh.parse("ep=4,tp=2"), corr)
    assert [s.device for s in target["layers/1/expert5/up"].shards] == [4, 5]
    made = plan(corr.export_layout_of(source), target, corr)
    held = {c.target_path for e in made.for_rank(0, "target").edges for c in e.copies if c.target_device == 0}
    assert {int(p.split("/")[2][6:]) for p in held if "expert" in p} == {0, 1}


def _cost(width: int) -> float:
    """Seconds to trace and plan the same tensors at another size."""
    cfg = family.FamilyConfig(64 * width, 4, 64 * width, 4, 2, 16 * width, 96 * width, num_dense_layers=1,
                              num_experts=16, d_expert=32 * width)  # fmt: skip
    source = paper_source(cfg, PaperMesh.parse("fsdp=16"))
    start = time.process_time()
    corr = trace(functools.partial(family.convert, cfg=cfg), source)
    plan(corr.export_layout_of(source), paper_target(cfg, PaperMesh.parse("ep=4,tp=2"), corr), corr)
    return time.process_time() - start


def test_cost_does_not_grow_with_the_size_of_tensors() -> None:
    _cost(1)
    small = min(_cost(1) for _ in range(3))
    large = min(_cost(64) for _ in range(3))  # 4096 times the parameters
    assert large < 2 * small + 0.2


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("plain_loop", "limit_cpu_s"), [(False, 20), (True, 60)])
def test_kimi_k2_from_256_to_128_devices(plain_loop: bool, limit_cpu_s: int) -> None:
    words = [sys.executable, str(PLAN_SCALE), "--width", "1", *["--plain-loop"] * plain_loop]
    done = subprocess.run(words, capture_output=True, text=True, timeout=560, check=True)
    row = json.loads(done.stdout)
    assert row["tensors"] == 69_853 and row["templates"] < 200 and row["plain_loop"] is plain_loop
    assert row["peak_bytes"] < 4 << 30
    assert row["trace_cpu_s"] + row["plan_cpu_s"] < limit_cpu_s  # a quarter of it where nothing else runs


def test_relays_prefer_a_chain_for_large_payloads() -> None:
    make = functools.partial(relay, payload_bytes=100 << 30, source_rate=100 << 30, replica_rate=100 << 30)
    direct, chain, tree = (make(8, shape=s) for s in ("direct", "chain", "tree"))
    assert direct.seconds == pytest.approx(8.0)
    assert chain.seconds < 1.01 and chain.depth == 8
    assert tree.seconds < direct.seconds and tree.depth == 4
    assert make(8) == chain
    for r in (direct, chain, tree):
        assert len(r.parents) == 8 and all(p < i for i, p in enumerate(r.parents))
    with pytest.raises(MappingError, match="at least 1"):
        make(0)
    with pytest.raises(MappingError, match="relay shape"):
        make(2, shape="ring")
