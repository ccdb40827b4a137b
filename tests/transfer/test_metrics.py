"""What hub and engines tell of themselves: the trace of rounds, and Prometheus' text read by its parser."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from jaxrl_sync.transfer import Version, auth
from jaxrl_sync.transfer.exposition import CONTENT_TYPE, Family, Sample, counter, gauge, render
from jaxrl_sync.transfer.hub.metrics import families
from jaxrl_sync.transfer.hub.state import HubState, MemberKey, Round
from jaxrl_sync.transfer.hub.trace import MAX_ROWS, PHASES, SIZED, Trace
from tests.transfer.models import Rig, ServerThread, take, trainer_params, until
from tests.transfer.servers import running_engine, running_hub


def parsed(text: str) -> dict[str, Any]:
    """Family name -> (kind, {labels as sorted pairs: value}); every family has HELP and TYPE."""
    found = {}
    for family in text_string_to_metric_families(text):
        assert family.documentation and family.type != "unknown", family.name
        found[family.name] = {
            (s.name.removeprefix(family.name), *sorted(s.labels.items())): s.value for s in family.samples
        }
    return found


def test_text_that_prometheus_reads_back() -> None:
    hard = 'a "quoted" \\ back\nslash'
    text = render(
        [
            gauge("a_bytes", 'help with \\ and "', Sample(1.5, {"x": hard, "rank": 0}), Sample(float("nan"))),
            counter("b_total", "two\nlines", Sample(3), Sample(float("inf"), {"x": "y"})),
            gauge("empty", "has no samples"),
            Family("c_seconds", "summary", "s", (Sample(0.25, {}, "_sum"), Sample(2, {}, "_count"))),
        ]
    )
    found = parsed(text)
    assert found["a_bytes"]["", ("rank", "0"), ("x", hard)] == 1.5
    assert found["b"]["_total",] == 3 and found["b"]["_total", ("x", "y")] == float("inf")
    assert found["c_seconds"] == {("_sum",): 0.25, ("_count",): 2}
    assert "empty" not in text and text.endswith("\n")


@pytest.mark.parametrize(
    ("name", "kind", "sample"),
    [
        ("a b", "gauge", Sample(1)),
        ("a", "counter", Sample(1)),
        ("a_total", "gauge", Sample(1)),
        ("a", "gauge", Sample(1, {"b-c": 1})),
        ("a", "gauge", Sample(1, {}, "_sum")),
    ],
)
def test_names_that_prometheus_would_not_take(name: str, kind: Any, sample: Sample) -> None:
    with pytest.raises(ValueError):
        Family(name, kind, "help", (sample,))


def test_a_round_leaves_rows_and_metrics(rig: Rig, hub: ServerThread, token_file: Path) -> None:
    params = trainer_params()
    publisher = rig.publisher(params, transport="tcp")
    subscriber = rig.subscriber(transport="tcp")
    client = rig.hub_client()
    for number in range(2):
        publisher.publish(params, Version("a", number))
        take(subscriber)
    until(lambda: len([r for r in client.trace().rows if r["kind"] == "round"]) == 2)
    until(lambda: len([r for r in client.trace().rows if r["kind"] == "edge"]) == 2)
    rows = client.trace().rows
    published = [r for r in rows if r["kind"] == "publish"]
    assert [r["version"]["number"] for r in published] == [0, 1]
    edge = [r for r in rows if r["kind"] == "edge"][1]
    assert {f"seconds_{p}" for p in PHASES} <= edge.keys() and {f"bytes_{p}" for p in SIZED} <= edge.keys()
    assert (edge["engine"], edge["rank"], edge["source"], edge["transport"]) == (
        "engine-0",
        0,
        "trainer.0",
        "tcp",
    )
    for phase in ("export", "queue", "wire", "verify", "swap", "commit"):
        assert edge[f"seconds_{phase}"] > 0, phase
    assert edge["bytes_wire"] > 0 and edge["bytes_export"] == published[1]["bytes_export"] > 0
    over = [r for r in rows if r["kind"] == "round"][1]
    assert over["state"] == "committed" and over["opened"] <= over["begun"] <= over["ended"]
    assert client.trace(rows[2]["seq"]).rows == rows[3:]
    assert client.trace(client.trace().seq).rows == []
    answer = httpx.get(f"{hub.url}/metrics", headers=auth.bearer_headers(client.token), timeout=60)
    assert answer.headers["content-type"] == CONTENT_TYPE
    found = parsed(answer.text)
    engine = ("engine", "engine-0"), ("model", "policy"), ("rank", "0")
    assert found["jaxrl_sync_version_number"]["", ("lineage", "a"), ("model", "policy")] == 1
    assert found["jaxrl_sync_installed_lag_versions"]["", *engine] == 0
    assert found["jaxrl_sync_rounds"]["_total", ("outcome", "committed")] == 2
    wire = found["jaxrl_sync_phase_seconds"]["_sum", ("phase", "wire"), ("transport", "tcp")]
    assert wire == pytest.approx(sum(r["seconds_wire"] for r in rows if r["kind"] == "edge"))
    assert found["jaxrl_sync_members"]["", ("role", "subscriber")] == 1


def test_metrics_need_the_token_unless_they_are_open(token_file: Path) -> None:
    token = auth.load_token(token_file)
    with running_hub(token_file) as url, running_engine(token) as engine:
        for base in (url, engine.url):
            assert httpx.get(f"{base}/metrics", timeout=60).status_code == 401
            answer = httpx.get(f"{base}/metrics", headers=auth.bearer_headers(token), timeout=60)
            assert answer.status_code == 200 and parsed(answer.text)
    with running_hub(token_file, metrics_open=True) as url:
        assert httpx.get(f"{url}/metrics", timeout=60).status_code == 200
        assert httpx.get(f"{url}/v1/status", timeout=60).status_code == 401
        refused = parsed(httpx.get(f"{url}/metrics", timeout=60).text)["jaxrl_sync_hub_refused"]
        assert refused == {("_total", ("reason", "token")): 1}


def test_reports_that_are_nonsense_leave_rows_of_zeros() -> None:
    trace, key = Trace(), MemberKey("subscriber", "e", 0)
    entry = Round("r-1", 1, "policy", "e", Version("a", 1), {0: "installed"}, {0: "i"}, {0: "i"}, "trainer")
    nonsense: list[Any] = [
        None,
        [],
        {"edges": 3},
        {"edges": [{"seconds": {"wire": float("nan"), "apply": -1, "swap": "x"}, "bytes": {"wire": 1e300}}]},
        {"edges": [{"source": "x\ny", "transport": 7, "payload": "p" * 500}] * 10_000},
    ]
    for number, report in enumerate(nonsense):
        trace.reported(key, Round(**{**vars(entry), "id": f"r-{number}"}), report, 1.0)
    assert len(trace.rows) == 1 + 256
    for row in trace.rows:
        assert all(row[f"seconds_{p}"] == 0 for p in PHASES) and row["source"] == ""
        assert len(json.dumps(row)) < 2000
    again = len(trace.rows)
    trace.reported(key, Round(**{**vars(entry), "id": "r-4"}), nonsense[4], 1.0)
    assert len(trace.rows) == again, "a repeated call counts once"


def test_the_trace_is_bounded() -> None:
    trace, key = Trace(), MemberKey("publisher", "p", 0)
    for number in range(MAX_ROWS + 10):
        trace.published(key, "policy", Version("a", number), {}, float(number))
    assert len(trace.rows) == MAX_ROWS and trace.seq == MAX_ROWS + 10
    assert [r["seq"] for r in trace.since(trace.seq - 2)] == [trace.seq - 1, trace.seq]
    trace.see(HubState("e"), HubState("e"), 0.0)
    assert trace.seq == MAX_ROWS + 10


def test_words_that_nobody_knows_make_no_labels_and_keep_no_real_ones_out() -> None:
    trace = Trace()
    entry = Round("r-1", 1, "policy", "e", Version("a", 1), {0: "installed"}, {0: "i"}, {0: "i"}, "trainer")
    invented = [{"transport": f"t{n}", "payload": f"p{n % 7}", "bytes": {"wire": 1}} for n in range(200)]
    for n, edge in enumerate([*invented, {"transport": "tcp", "payload": "frame", "bytes": {"wire": 5}}]):
        edge["seconds"] = {f"phase{n}": 1.0, "wire": 0.5}
        trace.reported(MemberKey("subscriber", "engine-0", n), entry, {"edges": [edge]}, 1.0)
    assert set(trace.payloads) == {("other", "other"), ("tcp", "frame")}
    assert set(trace.phases) == {(phase, word) for phase in PHASES for word in ("other", "tcp")}
    assert trace.payloads["other", "other"].nbytes == 200 and trace.payloads["tcp", "frame"].nbytes == 5
    state = HubState("e")
    shown = families(state, trace, now=0.0, t=0.0, refused={}, blobs_bytes=0)
    told = [pair for family in shown for sample in family.samples for pair in sample.labels.items()]
    labels = {value for name, value in told if name in ("transport", "payload")}
    assert labels == {"other", "tcp", "frame"}


def test_commit_counts_from_the_last_rank_s_announcement_and_export_is_the_slowest() -> None:
    trace, version = Trace(), Version("a", 1)
    for rank, (seconds, t) in enumerate(((0.5, 10.0), (0.2, 11.0))):
        key = MemberKey("publisher", "trainer", rank)
        trace.published(key, "policy", version, {"seconds": {"export": seconds}, "bytes": 64}, t)
    trace.published(MemberKey("publisher", "trainer", 0), "policy", version, {"bytes": 64}, 30.0)
    entry = Round("r-1", 1, "policy", "e", version, {0: "installed"}, {0: "i"}, {0: "i"}, "trainer")
    trace.reported(MemberKey("subscriber", "e", 0), entry, {"edges": [{"bytes": {"wire": 8}}]}, 31.0)
    row = trace.rows[-1]
    assert (row["seconds_export"], row["bytes_export"], row["bytes_wire"]) == (0.5, 64, 8)
    assert row["seconds_commit"] == 20.0


def test_rounds_that_end_unseen_leave_nothing() -> None:
    trace, before = Trace(), HubState("e")
    for number in range(MAX_ROWS + 2):
        entry = Round(f"r-{number}", 1, "policy", "e", Version("a", 1), {0: "begun"}, {}, {}, "trainer")
        after = HubState("e", rounds={entry.id: entry})
        trace.see(before, after, float(number))
        before = after
    assert len(trace.opened) == len(trace.begun) == 1
