"""Metrics as text that Prometheus scrapes (exposition format 0.0.4): families with HELP and TYPE."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterable, Mapping
from typing import Literal

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_NAME = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*\Z")
_LABEL = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]*\Z")
_SUFFIXES = {"counter": ("",), "gauge": ("",), "summary": ("", "_sum", "_count")}

Kind = Literal["counter", "gauge", "summary"]


@dataclasses.dataclass(frozen=True)
class Sample:
    """One value. ``suffix`` is ``_sum`` or ``_count`` in a summary, else empty."""

    value: float
    labels: Mapping[str, object] = dataclasses.field(default_factory=dict)
    suffix: str = ""


@dataclasses.dataclass(frozen=True)
class Family:
    """Samples of one name. Counters end in ``_total``, units are base units: seconds, bytes."""

    name: str
    kind: Kind
    help: str
    samples: tuple[Sample, ...]

    def __post_init__(self) -> None:
        if not _NAME.match(self.name) or (self.kind == "counter") != self.name.endswith("_total"):
            raise ValueError(
                f"{self.name!r} as a {self.kind}: expected letters, digits, _ (counters: _total)"
            )
        for sample in self.samples:
            if sample.suffix not in _SUFFIXES[self.kind]:
                raise ValueError(f"{self.name}{sample.suffix}: a {self.kind} has no such sample")
            for label in sample.labels:
                if not _LABEL.match(label):
                    raise ValueError(f"{self.name}: label {label!r}, expected letters, digits, _")


def gauge(name: str, text: str, *samples: Sample) -> Family:
    """A value that goes up and down."""
    return Family(name, "gauge", text, samples)


def counter(name: str, text: str, *samples: Sample) -> Family:
    """A value that only grows."""
    return Family(name, "counter", text, samples)


def render(families: Iterable[Family]) -> str:
    """The text. Families without samples are left out."""
    lines: list[str] = []
    for family in families:
        if family.samples:
            lines.append(f"# HELP {family.name} {_escape(family.help)}")
            lines.append(f"# TYPE {family.name} {family.kind}")
            lines += [_line(family.name, sample) for sample in family.samples]
    return "\n".join([*lines, ""])


def _line(name: str, sample: Sample) -> str:
    labels = ",".join(f'{key}="{_escape_value(value)}"' for key, value in sample.labels.items())
    return f"{name}{sample.suffix}{'{' + labels + '}' if labels else ''} {_number(sample.value)}"


def _number(value: float) -> str:
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    return repr(int(value)) if value == int(value) and abs(value) < 1e15 else repr(float(value))


def _escape(text: str) -> str:
    return text.replace("\\", r"\\").replace("\n", r"\n")


def _escape_value(value: object) -> str:
    return _escape(str(value)).replace('"', r"\"")
