"""``/swap`` of an engine whose versions come by themselves."""

from __future__ import annotations

import pytest

from jaxrl_sync.inference.arrivals import Arrivals, swap_answer
from jaxrl_sync.inference.errors import NotServingError, SwapTimeoutError
from jaxrl_sync.transfer.version import Version


def v(number: int, lineage: str = "a") -> Version:
    return Version(lineage, number)


def test_who_asks_is_answered_when_the_version_or_a_later_one_serves() -> None:
    arrivals = Arrivals()
    early, later, foreign = (arrivals.swap(x, 60.0) for x in (v(1), v(3), v(1, "b")))
    arrivals.arrived(v(1), swap_answer(v(1), pause_s=0.5, copied=7, shared=9, seconds=0.5))
    assert early.result(0)["number"] == 1 and early.result(0)["moved"] == {"copied": 7, "shared": 9}
    assert not later.done() and not foreign.done()
    arrivals.arrived(v(4), swap_answer(v(4), copied=7))
    assert later.result(0)["number"] == 4 and not foreign.done()


def test_the_first_to_ask_gets_the_report_and_the_rest_that_nothing_stood_still() -> None:
    arrivals = Arrivals()
    arrivals.arrived(v(2), swap_answer(v(2), pause_s=0.5, copied=7))
    assert arrivals.swap(v(2), 60.0).result(0)["bytes"] == 7
    again = arrivals.swap(v(1), 60.0).result(0)
    assert (again["number"], again["pause_s"], again["bytes"]) == (2, 0.0, 0)


def test_waits_end_at_their_deadline_and_when_the_engine_closes() -> None:
    arrivals = Arrivals()
    arrivals.arrived(v(1), swap_answer(v(1)))
    late, patient = arrivals.swap(v(9), 0.0), arrivals.swap(v(9), 60.0)
    arrivals.expire()
    with pytest.raises(SwapTimeoutError, match="swap to a:9: the trainer is at a:1"):
        late.result(0)
    assert not patient.done()
    arrivals.close()
    for future in (patient, arrivals.swap(v(9), 60.0)):
        with pytest.raises(NotServingError, match="closing"):
            future.result(0)
