"""Ports that failed lately are avoided for a while, if others would do."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from jaxrl_sync.transfer.verbs import health, rail
from jaxrl_sync.transfer.verbs.devices import Choice, Gid, Port
from jaxrl_sync.transfer.verbs.health import LONGEST_S, PAUSE_S, Health
from jaxrl_sync.transfer.verbs.settings import VerbsSettings


class Clock:
    def __init__(self) -> None:
        self.now = 100.0
        self.health = Health(self)

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[Clock]:
    """Three ports, all well, and a health of its own with a clock to turn."""
    made = Clock()
    gid = Gid(1, bytes(10) + b"\xff\xff" + bytes([10, 0, 0, 1]), "RoCE v2", "eth0")
    ports = [Port(f"mlx5_{i}", 1, "ACTIVE", "Ethernet", 100.0, 0, -1, (gid,)) for i in range(3)]
    monkeypatch.setattr(rail, "scan", lambda: ports)
    monkeypatch.setattr(rail, "HEALTH", made.health)
    yield made


def names(settings: VerbsSettings) -> list[str]:
    return [chosen.port.device for chosen in rail.pick(settings)]


def test_a_port_that_fails_for_days_stays_paused() -> None:
    now = Clock()
    found = Health(now)
    for _ in range(1100):
        found.failed("a:1")
        now.now += LONGEST_S
    found.failed("a:1")
    now.now += LONGEST_S - 0.1
    assert found.paused() == ("a:1",)


def test_a_burst_counts_once_and_every_further_failure_doubles_the_pause() -> None:
    now = Clock()
    found = Health(now)
    pause = PAUSE_S
    for _ in range(12):
        for _ in range(5):
            found.failed("a:1")
            now.now += 0.01
        assert found.paused() == ("a:1",)
        now.now += pause - 0.1
        assert found.paused() == ("a:1",)
        now.now += 0.1
        assert found.paused() == ()
        pause = min(LONGEST_S, 2 * pause)
    found.failed("a:1")
    found.well("a:1")
    found.failed("a:1")
    now.now += PAUSE_S + 0.01
    assert found.paused() == ()


def test_edges_avoid_a_port_that_failed_until_its_pause_is_over(clock: Clock) -> None:
    assert names(VerbsSettings()) == ["mlx5_0"]
    clock.health.failed("mlx5_0:1")
    assert names(VerbsSettings()) == ["mlx5_1"]
    assert names(VerbsSettings(rails=2)) == ["mlx5_1", "mlx5_2"]
    assert names(VerbsSettings(rails=3)) == ["mlx5_0", "mlx5_1", "mlx5_2"], "better than none"
    clock.now += PAUSE_S + 0.1
    assert names(VerbsSettings()) == ["mlx5_0"]


def test_named_ports_keep_their_order_and_a_lone_one_its_place(clock: Clock) -> None:
    both = Choice(include=("mlx5_2:1", "mlx5_0:1"))
    clock.health.failed("mlx5_2:1")
    assert names(VerbsSettings(choice=both)) == ["mlx5_0"]
    assert names(VerbsSettings(choice=both, rails=2)) == ["mlx5_2", "mlx5_0"]
    assert names(VerbsSettings(choice=Choice(include=("mlx5_2",)))) == ["mlx5_2"]


def test_the_process_has_one_health() -> None:
    assert isinstance(health.HEALTH, Health)
