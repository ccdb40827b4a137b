"""What ``jaxrl-sync replay PATH`` does: list a file channel, verify it, pin versions, restore one."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from jaxrl_sync.sharding.command_line import Parser
from jaxrl_sync.transfer import auth
from jaxrl_sync.transfer.errors import ResourceError
from jaxrl_sync.transfer.files import leases, replay
from jaxrl_sync.transfer.files.channel import Channel
from jaxrl_sync.transfer.files.config import Trust
from jaxrl_sync.transfer.files.names import CHANNEL


def main(words: Sequence[str]) -> int:
    """The exit code: 0, or 1 where ``--verify`` found something wrong. Errors are raised."""
    parser = Parser("jaxrl-sync replay", description=__doc__)
    parser.add_argument("path", help="the channel's folder")
    parser.add_argument("--version", metavar="V", help="NUMBER or LINEAGE:NUMBER; needs --out")
    parser.add_argument("--out", metavar="DIR", help="write that version here as an orbax checkpoint")
    parser.add_argument("--verify", action="store_true", help="read and check all of every version")
    parser.add_argument("--pin", metavar="V", help="keep a version whatever is collected")
    parser.add_argument("--unpin", metavar="V", help="let it go when its time comes")
    parser.add_argument("--token-file", metavar="FILE", help="the run token, where it sealed the channel")
    parser.add_argument("--owner", type=int, action="append", default=[], help="user id to trust as well")
    parser.add_argument("--json", action="store_true", help="one JSON object per line")
    options = parser.parse_args(words)
    if (options.version is None) != (options.out is None):
        parser.error("--version and --out go together")
    if not (Path(options.path) / CHANNEL).exists():
        raise ResourceError(f"{options.path} is no file channel: it has no file {CHANNEL}")
    token = auth.load_token(options.token_file) if options.token_file is not None else None
    with Channel.open(options.path, Trust(owners=frozenset(options.owner)), token) as channel:
        if options.pin is not None:
            leases.pin(channel, replay.find(channel, options.pin))
        if options.unpin is not None:
            leases.unpin(channel, replay.find(channel, options.unpin))
        if options.verify:
            return _verify(channel, options.json)
        if options.version is not None:
            version = replay.find(channel, options.version)
            nbytes = replay.restore(channel, version, Path(options.out))
            print(f"{options.out}: version {version}, {nbytes} bytes of weights")
            return 0
        _list(channel, options.json)
    return 0


def _list(channel: Channel, as_json: bool) -> None:
    for row in replay.rows(channel):
        if as_json:
            print(json.dumps(row))
            continue
        what = [f"anchor {row['anchor_bytes']} B"] if row["anchor"] else []
        what += [f"frames {row['delta_bytes']} B on {row['base']}"] if row["base"] is not None else []
        pin = ", pinned" if row["pinned"] else ""
        print(f"{row['number']:>8}  {row['lineage']}  {row['time']}  {', '.join(what)}{pin}")


def _verify(channel: Channel, as_json: bool) -> int:
    wrong = 0
    for found in replay.verify(channel):
        wrong += found.wrong is not None
        if as_json:
            row = {"lineage": found.version.lineage, "number": found.version.number}
            print(json.dumps({**row, "ways": list(found.ways), "wrong": found.wrong}))
        else:
            print(f"{found.version}: {found.wrong or 'sound, by ' + ' and by '.join(found.ways)}")
    return 1 if wrong else 0
