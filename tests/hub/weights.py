"""Weights as words that say where they come from, the memories that they are written to, export buffers."""

from __future__ import annotations

import itertools

from jaxrl_sync.transfer.version import Version

from .world import World

WORDS = 8
Word = tuple[str, int]  # which update wrote it last ("lineage:number"), its position

_generations = itertools.count(1)


class Truth:
    """What every version really consists of. An update changes some words, a lineage's first all."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._words: dict[Version, tuple[Word, ...]] = {}
        self.lineages = 0

    def lineage(self) -> str:
        """A training history that nobody had before."""
        self.lineages += 1
        return f"L{self.lineages}"

    def of(self, version: Version) -> tuple[Word, ...]:
        """The words of a version."""
        if version not in self._words:
            before = self._words.get(Version(version.lineage, version.number - 1)) if version.number else None
            draw = self._world.stream(f"update {version}")
            self._words[version] = tuple(
                (str(version), i) if before is None or draw.random() < 0.4 else before[i]
                for i in range(WORDS)
            )
        return self._words[version]


class Memory:
    """One slot: whoever refers to it can write, as to shared memory; but never while it serves."""

    def __init__(self, world: World, owner: str, positions: list[int]) -> None:
        self.generation = next(_generations)
        self.words: dict[int, Word | None] = dict.fromkeys(positions)
        self.serving: Version | None = None
        self._world = world
        self._owner = owner

    def write(self, position: int, word: Word, writer: str) -> None:
        """Put one word; a reader of the serving slot would see it at once."""
        self.words[position] = word
        if self.serving is not None:
            self._world.violated(
                f"{writer} wrote {word} into the slot of {self._owner} that serves {self.serving}"
            )

    def holds(self, words: tuple[Word, ...]) -> bool:
        """Whether every word is that of this version."""
        return all(word == words[i] for i, word in self.words.items())


class Buffer:
    """Export buffers, or a copy in host memory; ``readers`` are transfers that read it now."""

    def __init__(self, words: tuple[Word, ...]) -> None:
        self.words = list(words)
        self.readers = 0
