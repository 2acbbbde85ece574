"""Whose finished replies serve whose drafts, on a whole engine."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from slipstream.engine.api import Chat, Delta, Done, Request, Sampling
from slipstream.engine.service.run.thread import ThreadEngine
from slipstream.engine.service.start.launch import launch
from slipstream.engine.settings import Settings
from slipstream.engine.stats import DrafterCount

TARGET = str(Path(__file__).parents[2] / "demo" / "target")
ASK = Chat([{"role": "user", "content": "Continue this code:\n\ndef total(values):\n    result = 0\n"}])


async def reply(engine: ThreadEngine, name: str, tenant: str) -> tuple[str, DrafterCount]:
    """The text of one reply, and what `suffix` did for it."""
    sampling = Sampling(temperature=0.8, seed=11, top_p=1.0, top_k=0)
    request = Request(id=name, prompt=ASK, sampling=sampling, max_tokens=96, tenant=tenant)
    text, end = "", None
    async for event in await engine.submit(request):
        if isinstance(event, Delta):
            text += event.text
        else:
            end = event
    assert isinstance(end, Done)
    return text, end.speculation.drafters["suffix"]


async def replies(mode: str) -> list[tuple[str, DrafterCount]]:
    """Of one tenant, of the same again, and of another one."""
    engine = launch(
        Settings(
            model=TARGET, ctx_size=512, parallel=1, threads=1, spec_adaptive=False, spec_shared_history=mode
        )
    )
    try:
        return [
            await reply(engine, f"{mode}-{i}", tenant) for i, tenant in enumerate(("alpha", "alpha", "beta"))
        ]
    finally:
        await engine.close()


def done_for(count: DrafterCount) -> tuple[int, int]:
    return count.n_drafted, count.n_accepted


@pytest.mark.parametrize(
    ("mode", "again_is_faster", "other_is_faster"),
    [("off", False, False), ("tenant", True, False), ("all", True, True)],
)
def test_only_those_who_may_see_a_reply_are_served_by_it(
    mode: str, again_is_faster: bool, other_is_faster: bool
) -> None:
    (text, first), (text_again, again), (text_other, other) = asyncio.run(replies(mode))
    assert text == text_again == text_other
    for count, is_faster in ((again, again_is_faster), (other, other_is_faster)):
        if is_faster:
            assert count.n_accepted > 2 * first.n_accepted
        else:
            assert done_for(count) == done_for(first), "not a single draft differs from the first time"


def test_counts_outlive_the_server_in_the_file_that_was_given(tmp_path: Path) -> None:
    file = tmp_path / "counts.bin"

    async def once() -> DrafterCount:
        engine = launch(
            Settings(
                model=TARGET,
                ctx_size=512,
                parallel=1,
                threads=1,
                spec_type="ngram-cache",
                spec_adaptive=False,
                lookup_cache_dynamic=str(file),
            )
        )
        sampling = Sampling(temperature=0.0)
        stream = await engine.submit(Request(id="a", prompt=ASK, sampling=sampling, max_tokens=96))
        ends = [event async for event in stream if isinstance(event, Done)]
        await engine.close()
        return ends[0].speculation.drafters["ngram-cache"]

    first = asyncio.run(once())
    assert file.stat().st_size > 0
    second = asyncio.run(once())
    assert second.n_accepted > first.n_accepted, "what the first server counted drafts for the second"
