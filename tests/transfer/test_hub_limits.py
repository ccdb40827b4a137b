"""What callers can not have of the hub: more calls, members, names and memory than it gives."""

from __future__ import annotations

import asyncio
import json
import logging
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.responses import Response

from jaxrl_sync.transfer import HubClient, auth, impatient
from jaxrl_sync.transfer.guard import Guard
from jaxrl_sync.transfer.hub import room
from jaxrl_sync.transfer.hub import server as hub_server
from jaxrl_sync.transfer.hub.refused import HubRefused
from jaxrl_sync.transfer.rates import DEFAULT_LIMITS, Buckets, Rate, RateLimits
from jaxrl_sync.transfer.refusals import Refusals
from jaxrl_sync.transfer.version import Version
from tests.transfer.models import ServerThread
from tests.transfer.servers import refused_lines, running_hub


@pytest.mark.parametrize("descriptors", [256, 1024, 4096, 65536, 1 << 20])
def test_a_hub_takes_as_many_members_as_it_has_connections_for(descriptors: int) -> None:
    """It took 16384 members, and answered 503 from 2048 connections on."""
    found = room.Room.of(descriptors)
    strangers = min(impatient.MAX_UNPROVEN, descriptors // 2)
    assert found.members * room.CONNECTIONS_PER_MEMBER + strangers <= found.connections < descriptors
    assert found.members <= room.MAX_MEMBERS and found.refusal(found.members - 1) is None
    assert (found.members == room.MAX_MEMBERS) == (descriptors >= 65536)
    refusal = found.refusal(found.members)
    assert refusal is not None and f"{found.members} members are registered" in refusal


def test_a_member_too_many_is_refused_by_name_and_those_that_were_taken_are_all_served(
    token_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = room.Room.of(256)
    monkeypatch.setattr(room.Room, "here", lambda: small)
    token = auth.load_token(token_file)

    async def fleet(url: str) -> tuple[list[int], httpx.Response, httpx.Response]:
        limits = httpx.Limits(max_connections=None)
        headers = auth.bearer_headers(token)
        async with httpx.AsyncClient(base_url=url, headers=headers, limits=limits, timeout=60) as client:

            async def register(rank: int) -> httpx.Response:
                body = {"role": "subscriber", "name": "e", "rank": rank, "size": 4096, "incarnation": "i"}
                return await client.post("/v1/event/register", json={**body, "info": {}, "ttl_s": 60})

            assert {(await register(n)).status_code for n in range(small.members)} == {200}
            polls = room.CONNECTIONS_PER_MEMBER * small.members - 1  # one is left for what comes now
            waits = [client.post("/v1/newest", json={"model": "m", "timeout_s": 2.0}) for _ in range(polls)]
            waiting = asyncio.gather(*waits)
            refused, again = await register(small.members), await register(0)
            return [answer.status_code for answer in await waiting], refused, again

    with running_hub(token_file) as url:
        answers, refused, again = asyncio.run(fleet(url))
    assert set(answers) == {200} and again.status_code == 200
    assert refused.status_code == 400
    assert f"{small.members} members are registered" in refused.json()["message"]
    assert "limit of 256 open files (ulimit -n)" in refused.json()["message"]


def test_a_client_that_calls_too_often_is_told_to_wait_and_others_are_served(
    token_file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    limits = RateLimits(client=Rate(0.5, 10.0))  # 30 calls, but not within 40 s
    headers = auth.bearer_headers(auth.load_token(token_file))
    with (
        running_hub(token_file, limits=limits) as url,
        httpx.Client(base_url=url, headers=headers, timeout=60) as client,
    ):
        answers = [client.get("/v1/status") for _ in range(30)]
        busy = [a for a in answers if a.status_code == 429]
        assert answers[0].status_code == 200 and busy and int(busy[0].headers["retry-after"]) >= 1
        assert len([line for line in refused_lines(caplog) if "too many" in line]) == 1
        with HubClient(url, token_file) as patient:  # rides it out
            assert patient.members() == []


def test_strangers_of_many_addresses_take_no_calls_from_members(token_file: Path) -> None:
    token, passed = auth.load_token(token_file), list[str]()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        passed.append(scope["client"][0])

    def deny(scope: Any, status: int, message: str) -> Response:
        return Response(status_code=status)

    async def ignore(message: Any) -> None:
        pass

    refusals = Refusals(logging.getLogger("jaxrl_sync.hub"), "hub")
    guard = Guard(app, token=token, deny=deny, refusals=refusals, clock=lambda: 0.0)
    proof = [(b"authorization", f"Bearer {token}".encode())]

    async def call(address: str, headers: list[tuple[bytes, bytes]]) -> None:
        scope = {"type": "http", "path": "/health", "headers": headers, "client": (address, 1)}
        await guard(scope, ignore, ignore)  # type: ignore[arg-type]

    async def storm() -> None:
        for n in range(20_000):
            await call(f"2001:db8::{n % 5000:x}", [])
        strangers = len(passed)
        assert strangers == DEFAULT_LIMITS.strangers.burst
        for n in range(int(DEFAULT_LIMITS.all.burst)):
            await call(f"10.0.0.{n % 8}", proof)
        assert len(passed) - strangers == DEFAULT_LIMITS.all.burst, "every member's call"

    asyncio.run(storm())


def test_buckets_forget_and_fill() -> None:
    buckets = Buckets(Rate(2.0, 3.0), most=2)
    assert [buckets.take("a", 0.0) for _ in range(4)] == [0.0, 0.0, 0.0, 0.5]
    assert buckets.take("a", 0.5) == 0.0 and buckets.take("a", 0.5) == 0.5
    assert buckets.take("b", 0.5) == 0.0 and buckets.take("c", 0.5) == 0.0
    assert buckets.take("a", 0.5) == 0.0, "of many clients the one that called longest ago is forgotten"


@pytest.mark.parametrize("name", ["a\nhub refused", "\x1b[31m", "", "x" * 257, "\u2028"])
def test_names_that_would_forge_logs_are_refused(hub: ServerThread, token_file: Path, name: str) -> None:
    headers = auth.bearer_headers(auth.load_token(token_file))
    member = {"role": "publisher", "name": "p", "rank": 0, "size": 1, "incarnation": "i", "info": {}}
    with httpx.Client(base_url=hub.url, headers=headers, timeout=60) as client:
        assert client.post("/v1/event/register", json={**member, "name": name}).status_code == 400
        assert client.post("/v1/event/register", json=member).status_code == 200
        version = {"lineage": "a", "number": 0}
        body = {**member, "model": name, "version": version, "bytes": 1}
        assert client.post("/v1/event/announce", json=body).status_code == 400
        assert client.get("/v1/status").json()["newest"] == {}


@pytest.mark.parametrize("value", ['"\\ud800"', "NaN", "1e999", "1" + "0" * 400, '["x\\ny"]'])
def test_nonsense_in_any_field_is_refused_and_spoils_no_answer_to_others(
    hub: ServerThread, token_file: Path, value: str
) -> None:
    headers = auth.bearer_headers(auth.load_token(token_file))
    version = {"lineage": "a", "number": 1}
    body = {"role": "publisher", "name": "p", "rank": 0, "size": 1, "incarnation": "i", "model": "m"}
    body |= {"info": {"model": "m"}, "version": version, "held": [version], "round": "r", "reason": "x"}
    with httpx.Client(base_url=hub.url, headers=headers, timeout=60) as client:
        for kind in ("register", "announce", "hold", "advance", "fail", "pin"):
            for field in (*body, "to", "by", "parts", "fanout", "sequence", "bytes", "installed"):
                text = json.dumps({k: v for k, v in body.items() if k != field})[:-1]
                answer = client.post(f"/v1/event/{kind}", content=f'{text}, "{field}": {value}}}')
                assert answer.status_code < 500, (kind, field, answer.text)
        for path in ("/v1/status", "/metrics"):
            assert client.get(path).status_code == 200
        for path in ("/v1/members", "/v1/newest", "/v1/preflight", "/v1/trace"):
            assert client.post(path, json={"model": "m"}).status_code == 200, path


def test_a_member_can_not_have_versions_and_models_remembered_without_end(
    hub: ServerThread, token_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub_server, "MAX_HOLDINGS", 20)
    monkeypatch.setattr(hub_server, "MAX_MODELS", 5)
    headers = auth.bearer_headers(auth.load_token(token_file))
    me = {"role": "publisher", "name": "p", "rank": 0, "size": 1, "incarnation": "i"}
    with httpx.Client(base_url=hub.url, headers=headers, timeout=60) as client:

        def say(kind: str, **about: Any) -> int:
            return client.post(f"/v1/event/{kind}", json={**me, **about}).status_code

        here = {"info": {"model": "m"}, "ttl_s": 600}  # nobody renews the lease
        assert say("register", **here) == 200
        versions = [{"lineage": "a", "number": n} for n in range(40)]
        answers = [say("unpublish", model="m", version=v) for v in versions]
        assert answers == [200] * 20 + [400] * 20
        assert say("leave") == say("register", **here) == 200  # a new life, a new account
        tree = {"kind": "tree", "degree": 2}
        answers = [say("announce", model=f"m{n}", version=versions[0], fanout=tree) for n in range(8)]
        assert answers == [200] * 5 + [400] * 3
        assert say("announce", model="m0", version=versions[1], fanout=tree) == 200


def test_a_member_can_not_store_a_file_in_the_directory(hub: ServerThread, token_file: Path) -> None:
    headers = auth.bearer_headers(auth.load_token(token_file))
    member = {"role": "x", "name": "p", "rank": 0, "size": 1, "incarnation": "i", "info": {"a": "x" * 70_000}}
    answer = httpx.post(hub.url + "/v1/event/register", json=member, headers=headers, timeout=60)
    assert answer.status_code == 400 and "info" in answer.json()["message"]


def test_what_is_put_again_outlives_what_nobody_wants_any_more(
    token_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The layout of a fleet that goes on was the first to go: who joined could plan no more."""
    monkeypatch.setattr(hub_server, "MAX_BLOBS", 3)
    with running_hub(token_file) as url, HubClient(url, token_file) as client:
        layout, *others = [client.put_blob(bytes([n])) for n in range(3)]
        assert client.put_blob(bytes([0])) == layout
        client.put_blob(bytes([9]))
        assert client.get_blob(layout) == bytes([0])
        with pytest.raises(HubRefused, match="no such blob"):
            client.get_blob(others[0])


def test_a_version_that_is_none_is_refused_with_what_is_expected(token_file: Path) -> None:
    with running_hub(token_file) as url, HubClient(url, token_file) as client:
        with pytest.raises(HubRefused, match=r"a version's number is at most 1000000000000000, got 9223372"):
            client.pin(Version("run", 1 << 63), "eval")
        with pytest.raises(HubRefused, match="a version's lineage is printable and of at most 256"):
            client.pin(Version("x" * 257, 1), "eval")
