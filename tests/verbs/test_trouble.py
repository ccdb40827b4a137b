"""What a rail says about a failure: the port's state and the counters that moved since the edge began."""

from __future__ import annotations

import pytest

from jaxrl_sync.transfer.verbs import counters, rail
from jaxrl_sync.transfer.verbs.devices import Choice, Chosen, Gid, Port
from jaxrl_sync.transfer.verbs.settings import VerbsSettings
from tests.verbs.fakelib import Fake


def test_counters_of_trouble_are_part_of_an_error(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = {"sent_pkts": 10, "completer_retry_err": 1}
    monkeypatch.setattr(counters, "read", lambda device, port: dict(seen))
    gid = Gid(1, bytes(10) + b"\xff\xff" + bytes([10, 77, 0, 1]), "RoCE v2", "eth0")
    port = Port("fake0", 1, "ACTIVE", "Ethernet", 100.0, 0, -1, (gid,), (0xFFFF,))
    made = rail.Rail(VerbsSettings(Choice()), 0, Chosen(port, gid, "test"), "peer", 1, 8, 1)
    try:
        assert made.trouble() == ""
        seen.update(sent_pkts=500, completer_retry_err=5)
        assert made.trouble() == "counted on fake0:1 since the edge began: completer_retry_err 4"
        fake.knobs.port_state = 1
        assert made.trouble().startswith("port fake0:1 is DOWN, expected ACTIVE; counted on")
        found = made.stats()
        assert found["counters"] == {"sent_pkts": 490, "completer_retry_err": 4}
        assert (found["port"], found["strays"], len(found["latency_log2_ns"])) == ("fake0:1", 0, 1)
    finally:
        made.close()
