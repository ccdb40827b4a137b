"""The command line: ``jaxrl-sync run CONFIG`` and the roles, report, plan and status beside it.

Exit codes: 0 done; 1 run failed; 2 bad command line or config; 3 resource missing; 4 a peer died or a
deadline passed; 130 interrupted. A failure is one line on stderr. Imports are lazy: ``--help`` loads no jax.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from jaxrl_sync.sharding.command_line import Parser, UsageError
from jaxrl_sync.sharding.errors import UserError

INSTALL_HINT = "pip install 'jaxrl-sync[run]'"
ROLES = ("hub", "orchestrator", "trainer", "engine")
MAX_WATCH_S = 1e6


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code."""
    from jaxrl_sync.launch.worker import ERROR_PREFIX, missing_resource

    words = list(sys.argv[1:] if argv is None else argv)
    try:
        return _dispatch(words)
    except UserError as error:
        print(ERROR_PREFIX + " ".join(str(error).split()), file=sys.stderr)
        return error.exit_code
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] == "jaxrl_sync":
            raise
        print(f"{ERROR_PREFIX}package {error.name!r} is missing: {INSTALL_HINT}", file=sys.stderr)
        return 3
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:
        if (line := missing_resource(error)) is None:
            raise
        print(ERROR_PREFIX + line, file=sys.stderr)
        return 3
    except KeyboardInterrupt:
        print(ERROR_PREFIX + "interrupted", file=sys.stderr)
        return 130


def _dispatch(words: list[str]) -> int:
    if words[:1] == ["plan"]:
        from jaxrl_sync.sharding.cli import main as plan_main

        return int(plan_main(words[1:]) or 0)
    if words[:1] == ["verbs"]:
        from jaxrl_sync.transfer.verbs.cli import main as verbs_main

        return verbs_main(words[1:])
    if words[:1] == ["replay"]:
        from jaxrl_sync.transfer.files.cli import main as replay_main

        return replay_main(words[1:])
    overrides, words = _split_overrides(words)
    options, rest = _parser().parse_known_args(words)
    rest = [*overrides, *rest]
    command: str = options.command
    if command in ROLES:
        return _role(options, rest)
    if command == "run":
        from jaxrl_sync.launch.run import run

        return run(options.config, rest, run_dir=options.run_dir, resume=options.resume, dry=options.dry_run)
    if rest:
        raise UsageError(f"unrecognized arguments: {' '.join(rest)} (see `jaxrl-sync {command} --help`)")
    if command == "report":
        return _report(options)
    if command == "import-gguf":
        return _import_gguf(options)
    return _status(options)


def _split_overrides(words: list[str]) -> tuple[list[str], list[str]]:
    """Overrides with their values, and the rest: argparse would take a value for a positional argument."""
    overrides: list[str] = []
    rest: list[str] = []
    left = list(words)
    while left:
        word = left.pop(0)
        name, equals, _ = word.partition("=")
        if not (name.startswith("--") and "." in name):
            rest.append(word)
            continue
        overrides.append(word)
        if not equals and left and not left[0].startswith("--"):
            overrides.append(left.pop(0))
    return overrides, rest


def _parser() -> argparse.ArgumentParser:
    parser = Parser(prog="jaxrl-sync", description=__doc__.splitlines()[0] if __doc__ else None)
    commands = parser.add_subparsers(dest="command", required=True, parser_class=Parser)
    run = commands.add_parser("run", help="start and supervise a whole run on this machine")
    run.add_argument("config", help="TOML file; any value can be overridden by --section.key value")
    run.add_argument("--run-dir", help="directory of the run (default: a fresh one below run.root)")
    run.add_argument("--resume", action="store_true", help="go on with the run in --run-dir")
    run.add_argument("--dry-run", action="store_true", help="print the resolved config and stop")
    for role in ROLES:
        _add_role(commands.add_parser(role, help=f"the {role} process alone"), role)
    report = commands.add_parser("report", help="write one HTML page about a run, finished or not")
    report.add_argument("run_dir")
    report.add_argument("--out", help="the page to write (default: RUN_DIR/report.html)")
    status = commands.add_parser("status", help="what a run, or the fleet of a hub, is doing now")
    status.add_argument("run_dir", nargs="?", help="directory of the run; or give --hub and --token-file")
    status.add_argument("--hub", help="URL of the hub; with TLS its fragment says what to trust")
    status.add_argument("--token-file", help="the run token (default: RUN_DIR/token)")
    status.add_argument(
        "--watch", nargs="?", type=float, const=2.0, metavar="S", help="look again every S (2) seconds"
    )
    status.add_argument(
        "--preflight",
        nargs="?",
        const="policy",
        metavar="MODEL",
        help="compare what trainer ranks and engines told the hub; differences by name, exit code 1",
    )
    status.add_argument("--json", action="store_true", help="for programs; with --watch one line each time")
    gguf = commands.add_parser("import-gguf", help="make a checkpoint folder of a GGUF file (Llama, Qwen3)")
    gguf.add_argument("file")
    gguf.add_argument("folder", help="a new folder: config.json, model.safetensors, tokenizer.json")
    gguf.add_argument("--dtype", default="float32", choices=("float32", "bfloat16", "float16"))
    commands.add_parser(
        "plan", help="explain layouts and transfer plans (has its own --help)", add_help=False
    )
    commands.add_parser(
        "replay",
        help="versions of a file channel: list, verify, restore (has its own --help)",
        add_help=False,
    )
    commands.add_parser("verbs", help="show RDMA devices and the choice (has its own --help)", add_help=False)
    return parser


def _add_role(parser: argparse.ArgumentParser, role: str) -> None:
    if role == "engine":
        parser.add_argument(
            "standalone", nargs="?", metavar="CONFIG", help="serve without a hub from this config"
        )
        weights = parser.add_mutually_exclusive_group()
        weights.add_argument("--checkpoint", help="folder of the weights to serve (with CONFIG)")
        weights.add_argument(
            "--random-weights", action="store_true", help="serve random weights (with CONFIG)"
        )
        parser.add_argument("--replica", type=int, default=0)
    parser.add_argument("--run-dir", help="directory of the run")
    parser.add_argument("--config", help="config of the run (default: RUN_DIR/config.toml)")
    parser.add_argument("--hub", help="URL of the hub (default: from RUN_DIR/proc/hub.json)")
    parser.add_argument("--token-file", help="the run token (default: RUN_DIR/token)")
    parser.add_argument("--port", type=int, help="where to listen (default: as the config says)")
    if role in ("trainer", "engine"):
        parser.add_argument("--rank", type=int, default=0, help="of the processes of one JAX world")
        parser.add_argument("--coordinator", help="HOST:PORT of that world's rank 0")
    if role in ("trainer", "orchestrator"):
        parser.add_argument("--resume", action="store_true")


def _role(options: argparse.Namespace, rest: list[str]) -> int:
    from jaxrl_sync.config import load, parse_overrides
    from jaxrl_sync.config.process import ProcessContext
    from jaxrl_sync.launch.commands import process_name
    from jaxrl_sync.launch.environment import role_environment
    from jaxrl_sync.launch.roles import run_role

    role: str = options.command
    if role == "engine" and options.standalone is not None:
        from jaxrl_sync.launch.standalone import serve

        return serve(options, parse_overrides(rest))
    if options.run_dir is None:
        raise UsageError(f"{role} needs --run-dir (see `jaxrl-sync {role} --help`)")
    run_dir = Path(options.run_dir).absolute()
    config = load(options.config or run_dir / "config.toml", parse_overrides(rest))
    section = {"trainer": config.trainer, "engine": config.engine}.get(role)
    rank, replica = getattr(options, "rank", 0), getattr(options, "replica", 0)
    world_size = section.processes if section else 1
    if not 0 <= rank < world_size:
        raise UsageError(f"--rank {rank}: expected 0 to {world_size - 1} ({role}.processes={world_size})")
    if world_size > 1 and options.coordinator is None:
        raise UsageError(f"{role}.processes={world_size} needs --coordinator HOST:PORT")
    if section is not None:  # before jax is imported; the supervisor's children have it already
        os.environ.update(role_environment(os.environ, section))
    context = ProcessContext(
        role=role,
        name=process_name(role, replica, rank),
        config=config,
        run_dir=run_dir,
        token_file=Path(options.token_file or run_dir / "token"),
        hub_url=options.hub,
        rank=rank,
        world_size=world_size,
        replica=replica,
        coordinator=getattr(options, "coordinator", None),
        port=options.port,
        resume=getattr(options, "resume", False),
    )
    return run_role(context)


def _report(options: argparse.Namespace) -> int:
    from jaxrl_sync.report.page import write_report

    print(write_report(Path(options.run_dir), Path(options.out) if options.out else None))
    return 0


def _import_gguf(options: argparse.Namespace) -> int:
    from jaxrl_sync.inference.gguf_import import import_gguf

    model = import_gguf(Path(options.file), Path(options.folder), options.dtype)
    print(f"{options.folder}: {model.decoder}")
    return 0


def _status(options: argparse.Namespace) -> int:
    from jaxrl_sync.launch.status import Looker, show, show_preflight

    if options.run_dir is None and (options.hub is None or options.token_file is None):
        raise UsageError("status needs RUN_DIR, or --hub with --token-file (see `jaxrl-sync status --help`)")
    if options.watch is not None and not 0 < options.watch <= MAX_WATCH_S:
        raise UsageError(f"--watch {options.watch:g}: expected seconds above 0, at most {MAX_WATCH_S:g}")
    if options.watch is not None and options.preflight is not None:
        raise UsageError("--preflight looks once: expected no --watch beside it")
    run_dir = Path(options.run_dir) if options.run_dir is not None else None
    token_file = Path(options.token_file) if options.token_file is not None else None
    with Looker(run_dir, options.hub, token_file) as looker:
        if options.preflight is not None:
            return show_preflight(looker, options.preflight, as_json=options.json)
        show(looker, as_json=options.json, watch_s=options.watch)
    return 0


if __name__ == "__main__":
    sys.exit(main())
