"""Some seconds of `make soak`, and that it finds what it is for: losses, other texts, leaks.

Whether memory grows is for the long run.
"""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Iterable
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.attack.cases import Target
from tests.attack.cases import request as bytes_of
from tests.attack.neighbour import ATTACKER
from tests.process import Running, forked
from tests.soak import operations, replies
from tests.soak.__main__ import summary
from tests.soak.bodies import BODIES
from tests.soak.client import Client, Site, Tally, request
from tests.soak.operations import OPERATIONS, perform
from tests.soak.plot import PANELS, svg
from tests.soak.replies import Choice, Fault, Lost
from tests.soak.run import arguments, soak
from tests.soak.samples import Sample, Watch
from tests.soak.verdict import POOL, failures, memory

QUIET = Sample(
    at_s=0.0,
    rss_mib=500.0,
    children_mib=30.0,
    n_children=1,
    n_files=16,
    n_threads=15,
    n_pages_held=0,
    n_pages_cached=20,
    n_pages_free=6,
    n_busy=0,
    n_waiting=0,
    n_preempted=0,
    n_completion_tokens=0,
    n_drafted=0,
    n_accepted=0,
)
END = replace(QUIET, n_drafted=100, n_accepted=60)
HOUR = [replace(QUIET, at_s=10.0 * i, n_files=80, n_pages_held=20, n_pages_cached=6) for i in range(360)]
GOOD = (
    'data: {"choices": [{"index": 0, "text": "a"}]}',
    "",
    'data: {"choices": [{"index": 0, "finish_reason": "stop"}]}',
)

CUT = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n4\r\n{}  \r\n"


async def each(lines: Iterable[str]) -> AsyncIterator[str]:
    for line in lines:
        yield line


def passed() -> Tally:
    tally = Tally(n_compared=1)
    tally.end("chat", "whole")
    return tally


async def holding(server: Running) -> Sample:
    """A look at a server while a client holds two connections, on one of them an endless reply."""
    # Drafts would end it within a few passes: it soon repeats itself.
    more = {"ignore_eos": True, "stream": True, "speculative": {"n_max": 0}}
    body = json.dumps({"prompt": "x", "max_tokens": 1000, **more})
    clients = [await Target(server.url).connect() for _ in range(2)]
    clients[0][1].write(bytes_of("/v1/completions", body.encode()))
    await clients[0][0].readuntil(b"data:")  # the status line comes before a slot is taken
    async with aclosing(Watch(server)) as watch:
        await watch.get("/health")
        sample = await watch.look()
    for _, writer in clients:
        writer.close()
    return sample


async def test_a_server_passes(tmp_path: Path) -> None:
    """All kinds but the one that waits for the server's timeout."""
    kinds = [kind for kind in OPERATIONS if kind != "unread"]
    with forked(tmp_path / "log", arguments(4, str(tmp_path))) as server:
        course = await soak(server, 1.0, 12, kinds, n_known=2)
        found = failures(passed(), course.before, HOUR, await holding(server))
        assert [one.split(":")[0] for one in found[:3]] == ["n_busy", "n_pages_held", "n_files"], found
        assert server.surprises() == []
        assert server.stop() == 0
    told = summary(course)
    assert told["failures"] == [], told["notes"]
    assert told["n_texts_compared"] > 0
    assert told["after"]["n_pages_free"] + told["after"]["n_pages_cached"] > 0
    assert json.loads(json.dumps(told)) == told
    drawn = ElementTree.fromstring(svg([*course.samples, course.after], "a < b"))
    assert len(drawn.findall("{*}polyline")) == sum(len(curves) for _, curves in PANELS)


async def test_a_stream_is_read_like_a_whole_answer() -> None:
    streamed = await replies.streamed(each([*GOOD, "", "data: [DONE]", ""]))
    assert streamed == [Choice(text="a", reason="stop")]
    assert streamed == replies.whole({"choices": [{"index": 0, "text": "a", "finish_reason": "stop"}]})
    call = {"id": "x", "function": {"name": "look", "arguments": '{"n":'}}
    more = {"index": 0, "function": {"arguments": "1}"}}
    pieces = [{"tool_calls": [{"index": 0, **call}]}, {"tool_calls": [more]}]
    chunks = [f"data: {json.dumps({'choices': [{'index': 0, 'delta': one}]})}" for one in pieces]
    said = await replies.streamed(each([*chunks, GOOD[-1], "data: [DONE]"]))
    whole = {"name": "look", "arguments": '{"n":1}'}
    message = {"content": None, "tool_calls": [{"id": "y", "function": whole}]}
    assert said == replies.whole({"choices": [{"index": 0, "message": message, "finish_reason": "stop"}]})


@pytest.mark.parametrize(
    ("lines", "error"),
    [
        (GOOD, Lost),
        ((*GOOD[:1], "data: [DONE]"), Lost),
        (("data: [DONE]",), Lost),
        ((), Lost),
        ((*GOOD, "data: [DONE]", GOOD[0]), Fault),
        ((GOOD[0], 'data: {"error": {"message": "m"}}', "data: [DONE]"), Fault),
    ],
)
async def test_a_stream_without_its_end_is_lost(lines: Iterable[str], error: type[Exception]) -> None:
    with pytest.raises(error):
        await replies.streamed(each(lines))


async def test_a_server_that_is_gone_loses_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operations, "REST_S", 0.0)
    with socket.socket() as deaf:  # bound, but not listening
        deaf.bind(("127.0.0.1", 0))
        site = Site(f"http://127.0.0.1:{deaf.getsockname()[1]}", ["suffix"], 1)
        client = Client(site, ATTACKER, "seed")
        await perform(client, "chat")
        await client.aclose()
    assert site.tally.n_wrong["lost"] == 1
    assert failures(site.tally, QUIET, HOUR, END)[0] == "1 operations: lost"


@pytest.mark.parametrize("answer", [b"", CUT, CUT.replace(b"text/event-stream", b"application/json")])
async def test_an_answer_that_breaks_off_is_lost(answer: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operations, "REST_S", 0.0)

    async def half(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer)
        writer.close()

    async with await asyncio.start_server(half, "127.0.0.1", 0) as server:
        site = Site(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", ["suffix"], 1)
        client = Client(site, ATTACKER, "seed")
        for kind in ("chat", "status"):
            await perform(client, kind)
        await client.aclose()
    assert site.tally.n_wrong == {"lost": 2}


def test_another_text_is_found() -> None:
    site = Site("http://127.0.0.1:9", ["suffix"], 1, 1, {("chat", 0): [Choice(text="a", reason="stop")]})
    client = Client(site, ATTACKER, "seed")
    client.compare("chat", 0, [Choice(text="a", reason="stop")], {})
    client.compare("chat", None, [Choice(text="b", reason="stop")], {})
    with pytest.raises(replies.Different):
        client.compare("chat", 0, [Choice(text="a", reason="length")], {})


def test_known_requests_are_always_the_same() -> None:
    for kind in BODIES:
        assert request(kind, 1) == request(kind, 1)
        assert "seed" in request(kind, 1)[1]
    assert request("chat", 1) != request("chat", 2)


@pytest.mark.parametrize(
    ("left", "told"),
    [
        ({}, None),
        ({"rss_mib": 600.0}, None),  # of the run's last look alone: memory is compared under load
        ({"n_files": 17}, "n_files: 17 in the end, 16 allowed"),
        ({"n_threads": 16}, None),  # asyncio's pool may have grown
        ({"n_threads": 16 + POOL}, "n_threads"),
        ({"n_children": 2}, "n_children"),
        ({"n_busy": 1}, "n_busy"),
        ({"n_waiting": 1}, "n_waiting"),
        ({"n_pages_held": 1, "n_pages_free": 5}, "n_pages_held"),
        ({"n_pages_free": 5}, "25 pages free or cached in the end, 26 before"),
    ],
)
def test_what_is_left_behind_is_found(left: dict[str, int], told: str | None) -> None:
    found = failures(passed(), QUIET, HOUR, replace(END, **left))
    assert found == [] if told is None else found[0].startswith(told)


@pytest.mark.parametrize("name", ["rss_mib", "children_mib"])
@pytest.mark.parametrize(("share", "is_found"), [(0.02, False), (0.2, True)])
def test_memory_that_grows_is_found(name: str, share: float, is_found: bool) -> None:
    growing = [replace(one, **{name: getattr(one, name) * (1 + share * one.at_s / 3600)}) for one in HOUR]
    assert any(found.startswith(name) for found in failures(passed(), QUIET, growing, END)) == is_found
    first, last = memory(growing, name)
    assert first < last
    # What is taken in the first minutes, or for a moment, is no leak.
    early = [replace(one, **{name: 1.0}) if one.at_s < 500 else one for one in HOUR]
    assert failures(passed(), QUIET, early, END) == []
    moment = [replace(one, **{name: 9999.0}) if one.at_s == 3550 else one for one in HOUR]
    assert failures(passed(), QUIET, moment, END) == []


def test_a_run_that_tried_nothing_fails() -> None:
    assert failures(Tally(), QUIET, HOUR, END) == ["no text was compared"]
    for n_accepted in (0, 100):
        (found,) = failures(passed(), QUIET, HOUR, replace(END, n_accepted=n_accepted))
        assert found.startswith(f"of 100 drafted tokens {n_accepted}")
