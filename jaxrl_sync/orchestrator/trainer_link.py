"""The data connections to all trainer processes: one sender and one thread each, in step with each other."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

from jaxrl_sync.batch.connection import Ack, BatchSender, ConnectionConfig, TrainerState
from jaxrl_sync.orchestrator.errors import LoopError, PeerDiedError
from jaxrl_sync.orchestrator.threads import in_thread

_MARGIN_S = 30.0


class TrainerMismatchError(LoopError):
    """Trainer processes that contradict each other, or what the orchestrator knows."""

    exit_code = 4


@dataclasses.dataclass(frozen=True)
class TrainerInfo:
    """What one trainer process registered about itself."""

    name: str
    data_url: str
    data_rank: int
    data_ranks: int
    rows: int
    seq_len: int

    @classmethod
    def of(cls, name: str, info: Mapping[str, Any]) -> TrainerInfo:
        """From the ``info`` of a hub member of role ``trainer``."""
        numbers = {k: int(info[k]) for k in ("data_rank", "data_ranks", "rows", "seq_len")}
        return cls(name, str(info["data_url"]), **numbers)


class TrainerWatch:
    """Which trainer processes the hub's directory lists, and since when one is missing. No clock, no I/O.

    The data connection tells of a dead trainer only while a step is on its way; the directory always does.
    """

    def __init__(self, wait_s: float, names: Iterable[str] = ()) -> None:
        self._wait_s = wait_s
        self._missing_since: dict[str, float | None] = dict.fromkeys(names)

    def see(self, names: Iterable[str], now: float) -> None:
        """The directory lists ``names`` at ``now``.

        Raises ``PeerDiedError`` naming a process that was there and has been missing for ``wait_s``; a hub
        that restarts lists nobody until its members have registered again.
        """
        listed = set(names)
        for name in listed | self._missing_since.keys():
            since = self._missing_since.get(name)
            self._missing_since[name] = None if name in listed else since if since is not None else now
            if since is not None and name not in listed and now - since > self._wait_s:
                raise PeerDiedError(
                    f"trainer process {name} is gone: the hub has not heard of it for {now - since:.0f} s"
                )


class Sender(Protocol):
    """What ``BatchSender`` is to the link; blocking."""

    def connect(self) -> TrainerState: ...
    def send(self, step: int, frame: bytes | memoryview, timeout_s: float) -> Ack: ...
    def close(self) -> None: ...


class TrainerLink:
    """Owns one sender per trainer process; ``close()`` ends them all."""

    def __init__(
        self,
        infos: Sequence[TrainerInfo],
        lookup: Callable[[str], TrainerInfo],
        *,
        token: str,
        run_id: str,
        config: ConnectionConfig | None = None,
    ) -> None:
        self.infos = tuple(infos)
        shapes = {(i.data_ranks, i.rows, i.seq_len) for i in infos}
        if len(shapes) != 1:
            raise TrainerMismatchError(
                f"trainer processes disagree on (data_ranks, rows, seq_len): {sorted(shapes)}"
            )
        self.data_ranks, self.rows, self.seq_len = next(iter(shapes))
        served = {i.data_rank for i in infos}
        if served != set(range(self.data_ranks)):
            raise TrainerMismatchError(
                f"trainers serve data ranks {sorted(served)}, expected 0 to {self.data_ranks - 1}"
            )
        self._config = config or ConnectionConfig()

        def address_of(name: str) -> Callable[[], str]:
            return lambda: lookup(name).data_url

        self._senders: list[Sender] = [
            BatchSender(
                address_of(i.name), token=token, run_id=run_id, data_rank=i.data_rank, config=self._config
            )
            for i in infos
        ]

    async def connect(self) -> TrainerState:
        """Connect to all; what they have committed. Raises ``TrainerMismatchError`` if they disagree."""
        timeout_s = self._config.reconnect_s + _MARGIN_S
        states = await asyncio.gather(
            *(in_thread(s.connect, timeout_s=timeout_s, what="the trainer's hello") for s in self._senders)
        )
        found = {(s.lineage, s.number) for s in states}
        if len(found) != 1:
            raise TrainerMismatchError(f"trainer processes are at different versions: {sorted(found)}")
        return states[0]

    async def send(self, step: int, frames: Sequence[bytes], timeout_s: float) -> Ack:
        """Send each process its data rank's frame and wait for all acknowledgements; the first one's is
        returned.

        A broken connection is made again and the same bytes are sent again (``BatchSender``). Raises the
        first failure: ``PeerLost``, ``DeadlineError``, ``BatchRefused``.
        """
        calls = [
            in_thread(
                sender.send,
                step,
                frames[info.data_rank],
                timeout_s,
                timeout_s=timeout_s + self._config.reconnect_s + _MARGIN_S,
                what=f"the acknowledgement of step {step} by {info.name}",
            )
            for sender, info in zip(self._senders, self.infos, strict=True)
        ]
        acks = await asyncio.gather(*calls)
        versions = {(a.lineage, a.number) for a in acks}
        if versions != {(acks[0].lineage, step)}:
            raise TrainerMismatchError(
                f"step {step} was committed as {sorted(versions)}, expected number {step}"
            )
        return acks[0]

    def close(self) -> None:
        """Close all connections; a send in progress fails."""
        for sender in self._senders:
            sender.close()
