"""A real server on the demo pair whose clients leave, crowd it or ask for too long: slots and pages come back."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.process import DEMO, Running, forked
from tests.service.asking import ARGUMENTS, ask, body, freed, n_busy, n_generated

ABOUT = ("engine/core/*.py",)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with forked(tmp_path_factory.mktemp("log") / "log", (*ARGUMENTS, "-np", "2", "--max-queue", "2")) as one:
        yield one
        assert not one.surprises()


@pytest.mark.sampled(keep=3)
@pytest.mark.parametrize("n_chunks", [0, 1, 5, 50])
@pytest.mark.parametrize("is_accompanied", [False, True])
async def test_a_stream_that_is_left_frees_its_slot(
    server: Running, n_chunks: int, is_accompanied: bool
) -> None:
    """And the text of the request beside it is what it is alone."""
    async with httpx.AsyncClient(base_url=server.url, timeout=60) as http:
        alone = (await ask(http, 5, 300)).json()["choices"][0]["text"] if is_accompanied else ""
        before = await n_generated(http)
        other = asyncio.create_task(ask(http, 5, 300)) if is_accompanied else None
        fields = body(1, 480, stream=True, **{"speculative.n_max": 0})
        async with http.stream("POST", "/v1/completions", json=fields) as answer:
            lines = answer.aiter_lines()
            for _ in range(2 * n_chunks):  # each is followed by an empty line
                await anext(lines)
        await freed(http, n_busy_else=int(is_accompanied))
        if other is not None:
            assert (await other).json()["choices"][0]["text"] == alone
        # It was cancelled, not merely quick.
        assert await n_generated(http) - before < 480 + 300 * is_accompanied


@pytest.mark.parametrize("prompt", ["x", "def f(x): return x\n" * 55])
async def test_leaving_before_the_reply_frees_the_slot(server: Running, prompt: str) -> None:
    """Not streamed, and in the middle of a long prompt."""
    async with httpx.AsyncClient(base_url=server.url, timeout=60) as http:
        before = await n_generated(http)
        fields = body(1, 120, prompt=prompt, **{"speculative.n_max": 0})
        for wait_s in (0.01, 0.02, 0.03, 0.06):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await http.post("/v1/completions", json=fields)
            await asyncio.sleep(0.02)
            await freed(http, n_busy_else=0)
        assert await n_generated(http) - before < 4 * 120


async def test_a_full_queue_is_told_at_once(server: Running) -> None:
    async with httpx.AsyncClient(base_url=server.url, timeout=60) as http:
        tasks = [asyncio.create_task(ask(http, number, 400)) for number in range(4)]
        while sum(await n_busy(http)) < 4:
            await asyncio.sleep(0.005)
        refused = await ask(http, 9, 4)
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "queue_full")
        assert int(refused.headers["retry-after"]) >= 1
        assert [one.status_code for one in await asyncio.gather(*tasks)] == [200] * 4


async def test_time_limits(tmp_path: Path) -> None:
    """Of the wait and of the whole; whoever is next is served."""
    limits = ("-np", "1", "--max-queue-wait", "0.3", "--request-timeout", "1.0", "--spec-type", "none")
    arguments = (*DEMO[:2], "--threads", "1", "--ctx-size", "2048", *limits)
    with forked(tmp_path / "log", arguments) as server:
        async with httpx.AsyncClient(base_url=server.url, timeout=60) as http:
            started = time.monotonic()
            streamed = asyncio.create_task(ask(http, 1, 2000, stream=True))
            while (await n_busy(http))[0] < 1:
                await asyncio.sleep(0.005)
            waited = await ask(http, 2, 4)
            assert (waited.status_code, waited.json()["error"]["type"]) == (429, "rate_limit_error")
            assert int(waited.headers["retry-after"]) >= 1
            assert "--max-queue-wait" in waited.json()["error"]["message"]
            *_, error, end, _ = (await streamed).text.split("\n\n")
            assert time.monotonic() - started > 0.9
            assert end == "data: [DONE]"
            told = json.loads(error.removeprefix("data: "))["error"]
            assert (told["type"], told["code"]) == ("timeout_error", "request_timeout")
            whole = await ask(http, 3, 2000)
            assert (whole.status_code, whole.headers["x-should-retry"]) == (504, "false")
            assert (await ask(http, 4, 4)).status_code == 200
            await freed(http, n_busy_else=0)
