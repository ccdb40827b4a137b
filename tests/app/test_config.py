"""The config: what is refused and in which words, overrides, the saved copy, the command line around it."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from jaxrl_sync.cli import main
from jaxrl_sync.config import ConfigError, RunConfig, load, parse_overrides, render, save, toml
from jaxrl_sync.config.convert import to_decoder, to_engine, to_publisher, to_subscriber
from jaxrl_sync.config.process import ProcessContext
from jaxrl_sync.launch.preflight import PortError, check_ports
from jaxrl_sync.orchestrator.config import loop_config
from jaxrl_sync.sharding.presets.quantization import Quantization

ROOT = Path(__file__).resolve().parents[2]
ADDITION = str(ROOT / "experiments" / "addition" / "run.toml")

MIX = """
[[task.mix]]
name = "addition"
weight = 2

[[task.mix]]
name = "guess"
label = "number"
args = { max_turns = 2 }
"""

BAD = [
    (["--trainer.lr", "1e-3"], 2, "unknown key trainer.lr; known: "),
    (["--trainer.learning_rte", "1e-3"], 2, "did you mean 'learning_rate'?"),
    (["--extra.key", "1"], 2, "unknown key extra"),
    (["--run.steps", "many"], 2, "run.steps: found 'many'; input should be a valid integer"),
    (["--run.steps", '"5"'], 2, "run.steps: found '5'"),
    (["--run.steps", "0"], 2, "run.steps: found 0; input should be greater than or equal to 1"),
    (
        ["--engine.compute_dtype", "float16"],
        2,
        "engine.compute_dtype: found 'float16'; input should be 'float32' or 'bfloat16'",
    ),
    (["--trainer.mesh.tp", "3"], 2, "needs 6 devices, found 4 (trainer.processes=1 x trainer.devices=4)"),
    (
        ["--trainer.mesh.fsdp=1", "--trainer.mesh.tp=4", "--model.num_heads=12", "--model.num_kv_heads=6"],
        2,
        "trainer.mesh.tp = 4 must divide or be a multiple of model.num_kv_heads=6",
    ),
    (["--engine.devices", "3"], 2, "engine tp (engine.processes=1 x engine.devices=3) = 3 must divide"),
    (
        [
            *("--engine.placement", "colocated", "--engine.replicas", "1"),
            *("--trainer.devices", "8", "--trainer.mesh.fsdp", "4"),
        ],
        2,
        "colocated engine's tp (trainer.processes=1 x trainer.devices=8) = 8 must divide model.num_heads=4",
    ),
    (["--sync.mode", "sync"], 2, "sync.mode='sync' means loop.staleness_bound=0, found 2"),
    (["--engine.placement", "colocated"], 2, "is one replica, found engine.replicas=2"),
    (["--trainer.rows", "3"], 2, "trainer.mesh dp x fsdp = 2 must divide trainer.rows=3"),
    (["--model.num_kv_heads", "3"], 2, "model.num_heads=4 must be a multiple of model.num_kv_heads=3"),
    (["--loss.correction", "none"], 2, "loop.staleness_bound=2 trains on samples of older weights"),
    (["--loss.correction", "decoupled"], 2, "needs loss.anchor='proximal', found 'rollout'"),
    (["--loss.is_low", "3"], 2, "loss.is_low=3.0 must be below loss.is_high=2.0"),
    (["--loop.sampling.max_tokens", "99"], 2, "leaves no room for a prompt"),
    (["--engine.max_len", "999"], 2, "exceeds trainer.seq_len"),
    (["--model.checkpoint", "/no/such/folder"], 3, "model.checkpoint: /no/such/folder does not exist"),
    (["--run.seed.x", "1"], 2, "override --run.seed.x: run.seed is a value, not a table"),
    (["--task.name", "additoin"], 2, "unknown task 'additoin'"),
    (["--task.args.digit", "1"], 2, "has no argument 'digit'; did you mean 'digits'?"),
    (["--task.args.digits", "one"], 2, "digits='one', expected a value of type int"),
    (["--task.args.digits", "6"], 2, "engine.max_len=16 is below 17"),
    (["--model.vocab_size", "8"], 2, "model.vocab_size=8 is below the 16 tokens of task 'addition'"),
    (["--model.vocab_size", "17"], 2, "trainer.mesh.tp = 2 must divide model.vocab_size=17"),
    (
        ["--model.vocab_size", "18", "--engine.devices", "4", "--engine.slots", "64"],
        2,
        "= 4 must divide model.vocab_size=18",
    ),
    (["--sync.every_steps", "4"], 2, "sync.every_steps=4 needs loop.staleness_bound >= 3, found 2"),
    (["--loop.inflight_groups", "1", "--eval.samples", "99"], 2, "can't hold one group of 99"),
    (["--trainer.schedule", "cosine", "--trainer.warmup_steps", "9999"], 2, "for a cosine schedule"),
    (["--steps", "1"], 2, "unexpected argument '--steps'; overrides look like --section.key value"),
    (["--run.name", "../up"], 2, "run.name: found '../up'; string should match pattern"),
    (["--trainer.mesh", "2x2"], 2, "trainer.mesh: found '2x2'; input should be a table"),
    (["--run.steps"], 2, "override --run.steps has no value"),
    (["--loop.step_timeout_s", "inf"], 2, "loop.step_timeout_s: found inf; input should be"),
    (["--run.stuck_timeout_s", "1e300"], 2, "run.stuck_timeout_s: found 1e+300; input should be less than"),
    (["--hub.ttl_s", "nan"], 2, "hub.ttl_s: found nan; input should be"),
    (["--trainer.learning_rate", "inf"], 2, "trainer.learning_rate: found inf; input should be a finite"),
    (["--run.seed", str(2**32)], 2, "run.seed: found 4294967296; input should be less than 4294967296"),
    (["--run.steps", "9" * 5000], 2, "9...; input should be a valid integer"),
    (["--run.steps", "[" * 5000], 2, "[[...; input should be a valid integer"),
    (["--run.steps", "1\nseed = 3"], 2, r"run.steps: found '1\nseed = 3'"),
    (["--run.root", r'"a\u0000b"'], 2, "run.root: found a NUL character"),
    (["--engine.env", '{"A\\u0000" = "b"}'], 2, "engine.env: found a NUL character"),
    (["--engine.env", '{"A=B" = "c"}'], 2, "engine.env.A=B.[key]: found 'A=B'; string should match"),
    (["--loop.sampling.temperature", "1e-9"], 2, "loop.sampling.temperature: expected 0, or from 1e-06"),
    (
        ["--eval.temperature", "1e9"],
        2,
        "eval.temperature: expected 0, or from 1e-06 to 1e+06, got 1000",
    ),
    (["--loop.sampling.top_k", str(2**31)], 2, "loop.sampling.top_k: expected in [0, 2**31)"),
    (["--loop.group_size", "65537"], 2, "loop.group_size=65537: expected at most 65536"),
]


@pytest.mark.parametrize(("words", "code", "message"), BAD, ids=[" ".join(row[0])[:60] for row in BAD])
def test_a_bad_config_is_one_line_and_a_documented_code(
    words: list[str], code: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", ADDITION, "--dry-run", *words]) == code
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("jaxrl-sync: error: ") and err.count("\n") == 1
    assert message in err


BAD_COMMANDS = [
    (["run", "no/such.toml"], 3, "config file no/such.toml does not exist"),
    (["run", str(ROOT)], 2, "is a folder; expected a TOML file"),
    (["run", "--run.steps", "5", "no/such.toml"], 3, "config file no/such.toml does not exist"),
    (["run", ADDITION, "--run.steps", "--dry-run"], 2, "override --run.steps has no value"),
    (["run"], 2, "the following arguments are required: config"),
    (["frob"], 2, "invalid choice: 'frob'"),
    (["trainer"], 2, "trainer needs --run-dir"),
    (["status", "/"], 2, "/ is not a run directory"),
    (["run", ADDITION, "--resume"], 2, "--resume needs --run-dir"),
    (["report", "/no/such/run"], 2, "/no/such/run is not a run directory"),
    (["run", ADDITION, "--run.root", ADDITION], 3, f"{ADDITION}: File exists"),
    (["run", ADDITION, "--run-dir", f"{ADDITION}/x"], 3, "addition/run.toml/x: Not a directory"),
    (["run", ADDITION, "--run-dir", "/proc/self/x"], 3, "/proc/self/x: "),
]


@pytest.mark.parametrize(
    ("words", "code", "message"), BAD_COMMANDS, ids=[" ".join(r[0]) for r in BAD_COMMANDS]
)
def test_a_bad_command_is_one_line_and_a_documented_code(
    words: list[str], code: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == code
    err = capsys.readouterr().err
    assert err.startswith("jaxrl-sync: error: ") and err.count("\n") == 1
    assert message in err


@pytest.mark.parametrize(("role", "devices"), [("trainer", 4), ("engine", 2)])
def test_a_role_started_by_hand_gets_the_devices_of_its_section(
    role: str, devices: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_enable_fast_math=false")
    monkeypatch.setenv("JAX_PLATFORMS", "cuda")
    contexts: list[ProcessContext] = []

    def play(context: ProcessContext) -> int:
        contexts.append(context)
        return 0

    monkeypatch.setattr("jaxrl_sync.launch.roles.run_role", play)
    words = ["--run.host", "node7", "--run-dir", str(tmp_path), "--config", ADDITION]
    assert main([role, *words]) == 0  # the override's value is no engine's CONFIG
    assert [(context.name, context.config.run.host) for context in contexts] == [(f"{role}-0", "node7")]
    assert os.environ["JAX_PLATFORMS"] == "cpu"
    assert os.environ["XLA_FLAGS"].split() == [
        "--xla_cpu_enable_fast_math=false",
        f"--xla_force_host_platform_device_count={devices}",
    ]


def test_a_port_in_use_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        words = ["run", ADDITION, "--run-dir", str(tmp_path / "run"), "--hub.port", str(port)]
        assert main(words) == 3
    assert capsys.readouterr().err == f"jaxrl-sync: error: hub.port: port {port} of 127.0.0.1 is in use\n"
    assert not (tmp_path / "run").exists()


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="no IPv6 here")
def test_a_fixed_port_may_be_one_of_an_ipv6_host() -> None:
    """It was refused as one that can't be used."""
    with socket.create_server(("::1", 0), family=socket.AF_INET6) as taken:
        port = taken.getsockname()[1]
        config = load(ADDITION, {"run.host": "::1", "hub.port": port})
        with pytest.raises(PortError, match=f"hub.port: port {port} of ::1 is in use"):
            check_ports(config)
    check_ports(config)  # free again


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[run\n", "is not valid TOML"),
        (f"x = {'9' * 5000}\n", "can't be read: it has a number of thousands of digits"),
        (f"x = {'[' * 5000}\n", "or lists thousands deep"),
        ("[sync]\nmode = ['sync']\n", "loop.staleness_bound is missing (and 1 more)"),
        ("[sync.mode]\na = 1\n", "loop.staleness_bound is missing (and 1 more)"),
    ],
)
def test_toml_that_is_not_what_it_should_be_is_one_line(
    text: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Some were tracebacks: of Python's own limits, and of a mode that is no text."""
    known = "" if "sync" not in text else Path(ADDITION).read_text().replace("staleness_bound = 2", "")
    (tmp_path / "bad.toml").write_text(f"{known}\n{text}")
    assert main(["run", str(tmp_path / "bad.toml")]) == 2
    err = capsys.readouterr().err
    assert words in err and err.startswith("jaxrl-sync: error: ") and err.count("\n") == 1


def test_a_missing_value_is_named(tmp_path: Path) -> None:
    (tmp_path / "some.toml").write_text('[task]\nname = "addition"\n[loop]\nstaleness_bound = 0\n')
    with pytest.raises(ConfigError, match="model is missing"):
        load(tmp_path / "some.toml")


def test_asynchrony_without_a_word_on_correction_is_refused(tmp_path: Path) -> None:
    text = re.sub(r"correction = .*", "", Path(ADDITION).read_text())
    (tmp_path / "run.toml").write_text(text)
    with pytest.raises(ConfigError, match="found nothing; expected clip, tis_token"):
        load(tmp_path / "run.toml")
    assert load(tmp_path / "run.toml", {"loop.staleness_bound": 0}).loss.correction is None


def test_overrides_are_read_as_toml_and_else_as_text() -> None:
    words = [
        "--a.b",
        "2",
        "--a.c=1e-3",
        "--a.d",
        "true",
        "--a.e",
        "some text",
        "--a.f",
        '"7"',
        "--a.g",
        "[1, 2]",
    ]
    assert parse_overrides(words) == {
        "a.b": 2,
        "a.c": 1e-3,
        "a.d": True,
        "a.e": "some text",
        "a.f": "7",
        "a.g": [1, 2],
    }


def test_the_saved_config_gives_back_the_same_config(tmp_path: Path) -> None:
    overrides = {
        "engine.env.A": 'say "hi"\n\\',
        "engine.prefill_lengths": [4, 8],
        "trainer.memory_fraction": 0.5,
    }
    config = load(ADDITION, overrides)
    save(config, tmp_path / "config.toml")
    assert load(tmp_path / "config.toml") == config
    assert config.engine.env["A"] == 'say "hi"\n\\' and config.engine.prefill_lengths == (4, 8)


def test_the_writer_quotes_what_toml_needs_quoted() -> None:
    data = {"a b": {"x.y": "é\x7f\t", "n": -1, "f": 1e30, "l": [True, "z"], "none": None}, "empty": {}}
    import tomllib

    expected = {"a b": {"x.y": "é\x7f\t", "n": -1, "f": 1e30, "l": [True, "z"]}, "empty": {}}
    assert tomllib.loads(toml.dumps(data)) == expected


def test_dry_run_prints_the_resolved_config_and_makes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["run", ADDITION, "--dry-run", "--loop.staleness_bound", "4"]) == 0
    text = capsys.readouterr().out
    (tmp_path / "again.toml").write_text(text)
    assert load(tmp_path / "again.toml").loop.staleness_bound == 4
    assert sorted(p.name for p in tmp_path.iterdir()) == ["again.toml"]


def all_run_files() -> list[Path]:
    return sorted((ROOT / "experiments").rglob("run*.toml"))


@pytest.mark.parametrize("path", all_run_files(), ids=lambda p: str(p.relative_to(ROOT)))
def test_every_config_in_the_repository_loads(path: Path) -> None:
    config = load(path)
    assert isinstance(config, RunConfig)
    assert render(config)


def test_the_rooms_accept_what_the_config_makes() -> None:
    config = load(ADDITION, {"engine.processes": 2, "engine.devices": 1})
    assert to_engine(config).slots == config.engine.slots
    assert to_engine(config).quantization is None
    quantised = load(ADDITION, {"engine.weights": "fp8", "engine.weight_blocks": "1x128"})
    assert to_engine(quantised).quantization == Quantization("fp8", "1x128")
    again = load(
        ADDITION,
        {
            "loop.epochs": 3,
            "loop.last_batch": "drop",
            "loop.batch_by": "samples",
            "loop.engine_wait_s": 5.0,
            "loop.task_timeout_s": 6.0,
            "loop.task_threads": 7,
            "eval.share": 0.25,
        },
    )
    loop = loop_config(again)
    assert (loop.epochs, loop.last_batch, loop.batch_by, loop.eval.share) == (3, "drop", "samples", 0.25)
    assert (loop.engine_wait_s, loop.score_timeout_s, loop.task_threads) == (5.0, 6.0, 7)
    assert to_decoder(config).num_layers == config.model.num_layers
    assert to_publisher(config).chunk_bytes == config.sync.tcp.chunk_bytes
    assert (to_subscriber(config, 1, 1).engine, to_subscriber(config, 1, 1).size) == ("engine-1", 2)


@pytest.mark.invariant(52)
@pytest.mark.invariant(66)
def test_the_command_line_and_the_config_load_no_jax() -> None:
    program = (
        "import sys; from jaxrl_sync.cli import main\n"
        f"assert main(['run', {ADDITION!r}, '--dry-run']) == 0\n"
        "import jaxrl_sync.launch.supervisor, jaxrl_sync.launch.commands, jaxrl_sync.launch.roles\n"
        "assert 'jax' not in sys.modules, 'jax was imported'\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_fleet_settings_reach_both_sides() -> None:
    alone = load(ADDITION, {})
    assert to_publisher(alone).fanout == "star" and not to_subscriber(alone, 0, 0).relay
    wanted = {
        "engine.replicas": 3,
        "sync.fanout": "tree",
        "sync.fanout_degree": 3,
        "sync.site": "home",
        "sync.sites": ["home", "far"],
        "sync.spot": [2],
        "sync.offload_limit_mb": 5,
    }
    config = load(ADDITION, wanted)
    publisher = to_publisher(config)
    assert (publisher.fanout, publisher.fanout_degree, publisher.site) == ("tree", 3, "home")
    assert publisher.offload_limit_bytes == 5 << 20
    engines = [to_subscriber(config, replica, 0) for replica in range(3)]
    assert [(e.site, e.reliable, e.relay) for e in engines] == [
        ("home", True, True),
        ("far", True, True),
        ("home", False, True),
    ]
    with pytest.raises(ConfigError, match="sync.sites"):
        load(ADDITION, wanted | {"sync.sites": ["a", "b", "c", "d"]})
    with pytest.raises(ConfigError, match="sync.spot"):
        load(ADDITION, wanted | {"sync.spot": [3]})


def test_verbs_settings_reach_both_sides(tmp_path: Path) -> None:
    wanted = {
        "sync.transport": "verbs",
        "sync.verbs.devices": ["mlx5_0", "mlx5_1:1"],
        "sync.verbs.gid_index": 3,
    }
    config = load(ADDITION, wanted)
    assert to_publisher(config).verbs == to_subscriber(config, 0, 0).verbs
    choice = to_publisher(config).verbs.choice
    assert (choice.include, choice.gid_index) == (("mlx5_0", "mlx5_1:1"), 3)
    save(config, tmp_path / "config.toml")
    assert load(tmp_path / "config.toml").sync.verbs == config.sync.verbs


def test_a_mix_of_tasks_is_read_overridden_and_written_back(tmp_path: Path) -> None:
    text = Path(ADDITION).read_text().replace('[task]\nname = "addition"\n', MIX)
    (tmp_path / "mix.toml").write_text(text.replace("vocab_size = 16", "vocab_size = 20"))
    given = {"task.mix.1.weight": 0.5, "task.mix.0.args.digits": 2}
    config = load(tmp_path / "mix.toml", given)
    assert [(m.name, m.label, m.weight) for m in config.task.mix] == [
        ("addition", None, 2.0),
        ("guess", "number", 0.5),
    ]
    assert config.task.mix[0].args == {"digits": 2} and config.task.mix[1].args == {"max_turns": 2}
    save(config, tmp_path / "saved.toml")
    assert load(tmp_path / "saved.toml") == config


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["--task.mix.0.wight", "1"], "unknown key task.mix.0.wight; did you mean 'weight'?"),
        (["--task.mix.2.weight", "1"], "override --task.mix.2.weight: '2', expected a number from 0 to 1"),
        (["--task.mix.x", "1"], "override --task.mix.x: task.mix is a list, not a table"),
        (["--task.mix.0.weight", "0"], "task.mix.0.weight: found 0; input should be greater than 0"),
        (["--task.name", "addition"], "task.name='addition' beside [[task.mix]]"),
        (["--task.mix", "[]"], "task.name is missing: expected a task, or several as [[task.mix]]"),
        (["--task.mix.1.label", "addition"], "task.mix has 'addition' 2 times"),
        (["--model.vocab_size", "16"], "below the 19 tokens of task 'addition', 'number'"),
        (
            ["--task.mix.0.args.digits", "6"],
            "engine.max_len=16 is below 17: prompts of task 'addition' have up",
        ),
    ],
)
def test_a_bad_mix_is_one_line(
    tmp_path: Path, overrides: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    text = Path(ADDITION).read_text().replace('[task]\nname = "addition"\n', MIX)
    (tmp_path / "mix.toml").write_text(text.replace("vocab_size = 16", "vocab_size = 20"))
    assert main(["run", str(tmp_path / "mix.toml"), "--dry-run", *overrides]) == 2
    err = capsys.readouterr().err
    assert words in err and err.startswith("jaxrl-sync: error: ") and err.count("\n") == 1
