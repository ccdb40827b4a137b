"""Rounds of verbs edges: chunks written to their final place, or through a ring of registered memory.

Immediates have 32 bits: 8 of the round's tag and 24 of what is told. Nothing depends on the order in which
queue pairs deliver.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from jaxrl_sync.transfer.errors import ProtocolError, TransferError
from jaxrl_sync.transfer.verbs.endpoint import Endpoint, Memory, Ticket
from jaxrl_sync.transfer.verbs.handshake import Remote
from jaxrl_sync.transfer.verbs.rail import Rows

MAX_CHUNKS = 1 << 24
_WRITTEN, _ANSWERED = 1, 2


@dataclasses.dataclass(frozen=True)
class Ring:
    """``places`` chunks of ``chunk_bytes`` of this process's memory, registered."""

    memory: Memory
    places: int
    chunk_bytes: int

    def place(self, index: int, nbytes: int) -> memoryview:
        """Where chunk ``index`` lies."""
        start = index % self.places * self.chunk_bytes
        return self.memory.buffer[start : start + nbytes]


def check_count(count: int) -> None:
    """TransferError where an immediate couldn't name every chunk."""
    if count >= MAX_CHUNKS:
        raise TransferError(
            f"the edge has {count} chunks, expected fewer than {MAX_CHUNKS}: larger chunk_bytes"
        )


class PlacedSend:
    """One round of a placed edge, the sender's side: writes to the final place, an immediate at the end.

    ``pack(index, memory)`` fills the chunk's place in the arena; ``rows[index]`` says where it goes.
    """

    def __init__(self, endpoint: Endpoint, arena: Ring, slot: Remote, tag: int) -> None:
        self._endpoint, self._arena, self._slot, self._tag = endpoint, arena, slot, tag
        self._flying: dict[Ticket, int] = {}  # -> place in the arena

    def run(
        self,
        sizes: Sequence[int],
        rows: Sequence[Rows],
        pack: Callable[[int, memoryview], None],
        deadline: float,
    ) -> None:
        """Blocks until all of it is in the peer's memory. CompletionError, PeerLost, DeadlineError."""
        endpoint, arena = self._endpoint, self._arena
        free = list(range(arena.places))
        share = {lane.pair.token: 0 for lane in endpoint.lanes}
        for index, nbytes in enumerate(sizes):
            while not free:
                free += self._settle(deadline, f"writing chunk {index} of {len(sizes)}")
            place = free.pop()
            pack(index, arena.place(place, nbytes))
            moved = rows[index].copy()
            moved[:, 0] += np.uint64(place * arena.chunk_bytes)
            lane = endpoint.lightest(nbytes)
            self._flying[endpoint.write(lane, arena.memory, moved, self._slot, deadline)] = place
            share[lane.pair.token] += 1
        for lane in endpoint.lanes:
            self._flying[endpoint.say(lane, self._tag << 24 | share[lane.pair.token], deadline)] = -1
        while self._flying:
            self._settle(deadline, f"writing the last {len(self._flying)} chunks")
        endpoint.well()

    def _settle(self, deadline: float, what: str) -> list[int]:
        """Places in the arena that are free again."""
        found = []
        for record in self._endpoint.events(deadline, what):
            place = self._flying.pop((int(record["token"]), int(record["seq"])), -1)
            if place >= 0:
                found.append(place)
        return found


def count_placed(endpoint: Endpoint, tag: int, expected: int, deadline: float) -> None:
    """The receiver's side: one immediate of each queue pair, together as many chunks as the edge has.

    CompletionError, PeerLost, ProtocolError, DeadlineError.
    """
    shares: dict[int, int] = {}
    while len(shares) < len(endpoint.lanes):
        what = f"waiting for {len(endpoint.lanes) - len(shares)} of {len(endpoint.lanes)} queue pairs to end"
        for record in endpoint.events(deadline, what):
            if not record["receive"]:
                continue  # a probe
            token, share = int(record["token"]), value_of(int(record["imm"]), tag, endpoint.peer)
            if token in shares:
                raise ProtocolError(f"{endpoint.peer} ended queue pair 0x{record['qp_num']:06x} twice")
            shares[token] = share
    if sum(shares.values()) != expected:
        raise ProtocolError(f"{endpoint.peer} wrote {sum(shares.values())} chunks, expected {expected}")
    endpoint.well()


class RingSend:
    """One round through the peer's ring, the sender's side: an answered chunk's place is free again."""

    def __init__(self, endpoint: Endpoint, arena: Ring, remote: Remote, tag: int) -> None:
        self._endpoint, self._arena, self._remote, self._tag = endpoint, arena, remote, tag
        self._flying: dict[Ticket, int] = {}  # -> chunk
        self._open_ends: dict[int, int] = {}  # chunk -> what is still to come: our completion, the answer

    def run(self, sizes: Sequence[int], pack: Callable[[int, memoryview], None], deadline: float) -> None:
        """Blocks until the peer took all of it. CompletionError, PeerLost, ProtocolError, DeadlineError."""
        endpoint, arena = self._endpoint, self._arena
        for index, nbytes in enumerate(sizes):
            while index - arena.places in self._open_ends:
                self._settle(deadline, len(sizes))
            pack(index, arena.place(index, nbytes))
            at = index % arena.places * arena.chunk_bytes
            rows = np.array([[at, at, nbytes]], np.uint64)  # the same place in both rings
            imm, lane = self._tag << 24 | index, endpoint.lightest(nbytes)
            ticket = endpoint.write(lane, arena.memory, rows, self._remote, deadline, imm)
            self._flying[ticket] = index
            self._open_ends[index] = _WRITTEN | _ANSWERED
        while self._open_ends:
            self._settle(deadline, len(sizes))
        endpoint.well()

    def _settle(self, deadline: float, total: int) -> None:
        """Take completions; a chunk is over when both its ends are."""
        for record in self._endpoint.events(deadline, f"sending chunk {min(self._open_ends)} of {total}"):
            if record["receive"]:
                index, end = value_of(int(record["imm"]), self._tag, self._endpoint.peer), _ANSWERED
            else:
                found = self._flying.pop((int(record["token"]), int(record["seq"])), None)
                if found is None:
                    continue  # part of a chunk
                index, end = found, _WRITTEN
            if not self._open_ends.get(index, 0) & end:
                raise ProtocolError(f"{self._endpoint.peer} answered chunk {index}, which isn't on its way")
            self._open_ends[index] &= ~end
            if not self._open_ends[index]:
                del self._open_ends[index]


def take_chunks(
    endpoint: Endpoint,
    ring: Ring,
    tag: int,
    sizes: Sequence[int],
    take: Callable[[int, memoryview], None],
    deadline: float,
) -> None:
    """The receiver's side: ``take(index, memory)`` every chunk out of the ring, in whatever order they come.

    CompletionError, PeerLost, ProtocolError, DeadlineError.
    """
    missing = set(range(len(sizes)))
    while missing:
        for record in endpoint.events(deadline, f"receiving chunk {min(missing)} of {len(sizes)}"):
            if not record["receive"]:
                continue  # our own answers
            imm = int(record["imm"])
            index = value_of(imm, tag, endpoint.peer)
            if index not in missing:
                raise ProtocolError(f"{endpoint.peer} sent chunk {index} of {len(sizes)} again")
            take(index, ring.place(index, sizes[index]))
            missing.remove(index)
            endpoint.say(endpoint.lane(int(record["token"])), imm, deadline)
    endpoint.well()


def value_of(imm: int, tag: int, peer: str) -> int:
    """What an immediate of this round tells. ProtocolError for one of another round."""
    if imm >> 24 != tag:
        raise ProtocolError(f"{peer} sent an immediate of round tag {imm >> 24}, expected {tag}")
    return imm & (MAX_CHUNKS - 1)
