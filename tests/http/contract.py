"""What every `AsyncEngine` must do, as checks to run on a ready engine. The fake passes them, and so must the
real one: otherwise the HTTP tests would prove nothing.

`CHECKS` leave the engine as they found it; `ENDINGS` each need an engine of their own and end it.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable
from dataclasses import replace

import pytest

from slipstream.engine.api import (
    AsyncEngine,
    Delta,
    Done,
    Echo,
    Event,
    EventStream,
    Failed,
    Progress,
    Request,
    Sampling,
    Speculate,
)
from slipstream.engine.errors import (
    ContextTooLong,
    EngineStopped,
    InvalidRequest,
    RequestError,
    SlotFileRefused,
)
from slipstream.engine.stats import EngineStats

Check = Callable[[AsyncEngine], Awaitable[None]]
LIMIT_S = 60.0
GREEDY = Sampling(temperature=0.0, ignore_eos=True)


def ask(name: str, **changes: object) -> Request:
    """A request of eight tokens, whatever the model would rather do."""
    base = Request(id=f"contract-{name}", prompt="one two three four", sampling=GREEDY, max_tokens=8)
    return replace(base, **changes)


async def events_of(stream: EventStream) -> list[Event]:
    async with asyncio.timeout(LIMIT_S):
        return [event async for event in stream]


async def outcome(engine: AsyncEngine, request: Request) -> tuple[list[Delta], Done]:
    """Deltas and the end of a request that must succeed; checks the order of events."""
    events = await events_of(await engine.submit(request))
    *deltas, end = events
    assert isinstance(end, Done), end
    assert all(isinstance(one, Delta) for one in deltas)
    return deltas, end


async def idle(engine: AsyncEngine) -> EngineStats:
    """Every slot must come back within a step or two; returns the picture that shows it."""
    async with asyncio.timeout(LIMIT_S):
        while True:
            stats = engine.stats()
            if not any(slot.busy for slot in stats.slots) and not stats.n_waiting:
                return stats
            await asyncio.sleep(0.005)


async def info_is_filled(engine: AsyncEngine) -> None:
    info = engine.info
    assert engine.status == "ready"
    assert info.name
    assert info.fingerprint
    assert info.n_slots == len(engine.stats().slots) > 0
    assert info.n_ctx > 0
    assert info.vocab_size > 0


async def drafting_is_reported(engine: AsyncEngine) -> None:
    told = await engine.speculation()
    assert set(told.drafters) <= set(engine.info.drafters)
    assert len(told.lengths) == len(told.n_lengths)
    assert 0.0 <= told.drafted_share <= 1.0


async def ends_once(engine: AsyncEngine) -> None:
    stream = await engine.submit(ask("once"))
    *_, end = await events_of(stream)
    assert isinstance(end, Done)
    for _ in range(2):
        with pytest.raises(StopAsyncIteration):
            await anext(stream)
    await stream.aclose()
    await stream.aclose()


async def counts_add_up(engine: AsyncEngine) -> None:
    request = ask("counts")
    stream = await engine.submit(request)
    assert len(stream.prompt_ids) > 0
    *deltas, end = await events_of(stream)
    assert isinstance(end, Done)
    assert (end.reason, end.stop_string) == ("length", None)
    assert end.usage.n_prompt == len(stream.prompt_ids)
    assert 0 <= end.usage.n_cached < end.usage.n_prompt
    assert end.usage.n_completion == request.max_tokens == sum(len(one.token_ids) for one in deltas)
    for one in deltas:
        assert len(one.token_ids) == len(one.sources)
        assert not one.pieces or "".join(one.pieces) == one.text


async def logprobs_come_with_their_text(engine: AsyncEngine) -> None:
    for n_top in (0, 3):
        deltas, _ = await outcome(engine, ask(f"logprobs-{n_top}", logprobs=n_top))
        n_chars, text, written = 0, "".join(one.text for one in deltas), b""
        for delta in deltas:
            for one in delta.logprobs:
                assert n_chars <= one.offset < n_chars + len(delta.text)
                assert one.offset == len(written.decode(errors="ignore"))
                assert len(one.top) == n_top
                assert math.isfinite(one.logprob)
                written += one.data
            n_chars += len(delta.text)
        assert written.decode(errors="replace") == text
    deltas, _ = await outcome(engine, ask("no-logprobs"))
    assert not any(delta.logprobs for delta in deltas)


async def a_reply_goes_on_where_another_run_stopped(engine: AsyncEngine) -> None:
    request = ask("whole", sampling=replace(GREEDY, seed=3), echo=True, progress=True, logprobs=1)
    *whole, end = await events_of(await engine.submit(request))
    deltas = [one for one in whole if isinstance(one, Delta)]
    assert isinstance(end, Done)
    assert len(deltas) > 1
    for n_had in range(1, len(deltas) + 1):
        had = tuple(token_id for one in deltas[:n_had] for token_id in one.token_ids)
        moved, last = await outcome(engine, replace(request, id=f"contract-moved-{n_had}", emitted=had))
        both = [*deltas[:n_had], *moved]
        assert [one for delta in both for one in delta.token_ids] == [
            one for delta in deltas for one in delta.token_ids
        ]
        assert [one for delta in both for one in delta.logprobs] == [
            one for delta in deltas for one in delta.logprobs
        ]
        assert "".join(one.text for one in both) == "".join(one.text for one in deltas)
        assert (last.reason, last.usage.n_completion) == (end.reason, end.usage.n_completion)
        assert last.usage.n_prompt == end.usage.n_prompt
    with pytest.raises(InvalidRequest, match="seed"):
        await engine.submit(ask("seedless", emitted=(1,)))


async def an_echo_comes_first(engine: AsyncEngine) -> None:
    for n_top, asks_text in ((None, True), (1, True), (2, False)):
        stream = await engine.submit(ask(f"echo-{n_top}", echo=asks_text, prompt_logprobs=n_top))
        first, *others = await events_of(stream)
        assert isinstance(first, Echo)
        assert list(first.token_ids) == list(stream.prompt_ids)
        assert len(first.pieces) == len(first.token_ids)
        assert len(first.logprobs) == (0 if n_top is None else len(first.token_ids))
        assert all((one is None) == (i == 0) for i, one in enumerate(first.logprobs))
        assert all(one is None or len(one.top) == n_top for one in first.logprobs)
        assert not any(isinstance(one, Echo) for one in others)


async def a_prompts_progress_is_reported(engine: AsyncEngine) -> None:
    for n_most in (8, 0):
        stream = await engine.submit(ask(f"progress-{n_most}", progress=True, max_tokens=n_most))
        *events, end = await events_of(stream)
        assert isinstance(end, Done)
        far = [one for one in events if isinstance(one, Progress)]
        assert events[: len(far)] == far, "nothing is written before the prompt is there"
        counts = [one.n_processed for one in far]
        assert counts == sorted(set(counts))
        assert far[0].n_processed == far[0].n_cached
        assert far[-1].n_processed == far[-1].n_prompt == len(stream.prompt_ids)
        assert all(one.n_cached <= one.n_processed and one.seconds >= 0 for one in far)
        assert {one.slot for one in far} == {end.slot}
    events = await events_of(await engine.submit(ask("no-progress")))
    assert not any(isinstance(one, Progress) for one in events)


async def a_slot_may_be_chosen(engine: AsyncEngine) -> None:
    for slot in (1, 0, 1):
        _, end = await outcome(engine, ask(f"in-{slot}", slot=slot))
        assert end.slot == slot
    with pytest.raises(InvalidRequest) as wrong:
        await engine.submit(ask("nowhere", slot=engine.info.n_slots))
    assert wrong.value.param == "id_slot"


async def a_prompt_may_mix_ids_and_texts(engine: AsyncEngine) -> None:
    first = await engine.prompt_ids("one two")
    rest = await engine.tokenize(" three", add_special=False, parse_special=True)
    stream = await engine.submit(ask("mixed", prompt=("one two", *rest)))
    assert list(stream.prompt_ids) == [*first, *rest]
    await stream.aclose()
    await idle(engine)


async def enough_is_enough(engine: AsyncEngine) -> None:
    stream = await engine.submit(ask("enough", max_tokens=None))
    first = await anext(stream)
    assert isinstance(first, Delta)
    stream.finish()
    *deltas, end = await events_of(stream)
    assert isinstance(end, Done)
    assert (end.reason, end.stop_string) == ("stop", None)
    n_told = sum(len(one.token_ids) for one in (first, *deltas) if isinstance(one, Delta))
    assert end.usage.n_completion == n_told < 100
    assert end.speculation.n_steps <= n_told
    await idle(engine)


async def prompt_ids_are_those_of_a_request(engine: AsyncEngine) -> None:
    request = ask("prompt-ids")
    stream = await engine.submit(request)
    assert list(stream.prompt_ids) == await engine.prompt_ids(request.prompt)
    assert stream.prompt_tail
    await stream.aclose()


async def figures_are_sound(engine: AsyncEngine) -> None:
    _, end = await outcome(engine, ask("figures"))
    times = end.timings
    assert 0.0 <= times.draft_s <= times.draft_s + times.verify_s <= times.generation_s + 1e-9
    assert all(math.isfinite(one) and one >= 0 for one in (times.queue_s, times.prompt_s, times.generation_s))
    run = end.speculation
    assert len(run.histogram) == run.n_max + 1
    assert sum(run.histogram) == run.n_steps
    assert sum(n * steps for n, steps in enumerate(run.histogram)) == run.n_accepted <= run.n_drafted
    assert run.n_min <= run.n_max
    assert run.n_steps <= end.usage.n_completion
    assert set(run.drafters) <= set(engine.info.drafters)
    assert not run.synthetic
    for count in run.drafters.values():
        assert 0 <= count.n_drafts_accepted <= count.n_drafts <= run.n_steps
        assert count.n_drafts_accepted <= count.n_accepted <= count.n_drafted >= count.n_drafts
        assert sum(count.accepted_by_position) == count.n_accepted
        assert sum(count.drafted_by_position) == count.n_drafted
        assert len(count.accepted_by_position) <= len(count.drafted_by_position) <= run.n_max
        assert min(count.n_begin_calls, count.n_draft_calls, count.n_accept_calls) >= 0
        assert all(math.isfinite(one) and one >= 0 for one in (count.begin_s, count.draft_s, count.accept_s))


async def slots_tell_drafters(engine: AsyncEngine) -> None:
    stream = await engine.submit(ask("slots", max_tokens=None, tenant="mine:salt"))
    await anext(stream)
    busy = [slot for slot in engine.stats().slots if slot.busy]
    assert [(slot.request_id, slot.tenant) for slot in busy] == [("contract-slots", "mine:salt")]
    assert set(busy[0].drafters) <= set(engine.info.drafters)
    assert busy[0].recent
    assert all(0 <= n_accepted <= n_drafted <= busy[0].n_max for n_drafted, n_accepted in busy[0].recent)
    await stream.aclose()
    assert not any(slot.drafters or slot.tenant or slot.recent for slot in (await idle(engine)).slots)
    assert set(engine.stats().drafters) <= set(engine.info.drafters)


async def steps_are_split(engine: AsyncEngine) -> None:
    await outcome(engine, ask("parts"))
    stats = await idle(engine)
    for split in (stats.step_s, stats.step_average_s):
        assert all(math.isfinite(seconds) and seconds >= 0 for seconds in split.values())
    assert list(stats.step_s) == list(stats.step_average_s)
    assert "forward" in stats.step_s
    assert sum(stats.step_s.values()) >= sum(stats.step_average_s.values())


async def sources_name_drafters(engine: AsyncEngine) -> None:
    deltas, end = await outcome(engine, ask("sources"))
    named = {source for one in deltas for source in one.sources if source is not None}
    assert named <= set(end.speculation.types) <= set(engine.info.drafters)


async def steps_are_told(engine: AsyncEngine) -> None:
    deltas, end = await outcome(engine, ask("steps", max_tokens=32, steps=True))
    told = [step for one in deltas for step in one.steps]
    assert [step.index for step in told] == list(range(len(deltas)))
    for delta, step in zip(deltas, told, strict=True):
        accepted = [i for i, name in zip(delta.token_ids, delta.sources, strict=True) if name is not None]
        assert list(step.token_ids[: step.n_accepted]) == accepted
        assert len(step.pieces) == len(step.token_ids) <= end.speculation.n_max
        assert (step.drafter in end.speculation.types) == bool(step.token_ids)
        assert step.why_not is None or not step.token_ids
    deltas, _ = await outcome(engine, ask("no-steps"))
    assert not any(one.steps for one in deltas)


async def seed_is_told(engine: AsyncEngine) -> None:
    for seed in (0, 2**64 - 1):
        _, end = await outcome(engine, ask("seed", sampling=Sampling(seed=seed)))
        assert end.seed == seed
    _, end = await outcome(engine, ask("no-seed", sampling=Sampling()))
    assert 0 <= end.seed < 2**64


async def same_seed_same_text(engine: AsyncEngine) -> None:
    request = ask("same", sampling=Sampling(seed=42, ignore_eos=True))
    texts = []
    for speculate in (Speculate(), Speculate(types=()), Speculate(n_max=1)):
        deltas, _ = await outcome(engine, replace(request, speculate=speculate))
        texts.append("".join(one.text for one in deltas))
    assert len(set(texts)) == 1


async def speculation_only_narrows(engine: AsyncEngine) -> None:
    _, free = await outcome(engine, ask("free"))
    _, greedy = await outcome(engine, ask("greedy", speculate=Speculate(n_max=10**6)))
    assert greedy.speculation.n_max == free.speculation.n_max
    _, none = await outcome(engine, ask("none", speculate=Speculate(types=())))
    assert (none.speculation.types, none.speculation.n_drafted) == ((), 0)
    _, zero = await outcome(engine, ask("zero", speculate=Speculate(n_max=0, n_min=5)))
    assert (zero.speculation.n_max, zero.speculation.n_min, zero.speculation.n_drafted) == (0, 0, 0)


async def ngram_settings_are_told(engine: AsyncEngine) -> None:
    asked = Speculate(ngram_size_n=3, ngram_size_m=8, ngram_min_hits=2)
    _, end = await outcome(engine, ask("ngram", speculate=asked))
    run = end.speculation
    assert (run.ngram_size_n, run.ngram_size_m, run.ngram_min_hits) == (3, 8, 2)
    _, end = await outcome(engine, ask("plain"))
    run = end.speculation
    assert (run.ngram_size_n, run.ngram_size_m, run.ngram_min_hits) == (None, None, None)


async def a_prediction_changes_no_text(engine: AsyncEngine) -> None:
    alone, _ = await outcome(engine, ask("alone", max_tokens=32))
    text = "".join(one.text for one in alone)
    loaded = "prediction" in engine.info.drafters
    for prediction, comes_true in ((text, True), ("five six seven eight nine", False)):
        only = Speculate(types=("prediction",)) if loaded else Speculate()
        request = ask("predicted", max_tokens=32, prediction=prediction, speculate=only)
        deltas, end = await outcome(engine, request)
        assert "".join(one.text for one in deltas) == text
        if loaded and comes_true:
            assert end.speculation.drafters["prediction"].n_accepted > 0


async def refuses_before_any_event(engine: AsyncEngine) -> None:
    far = engine.info.vocab_size
    with pytest.raises(ContextTooLong) as caught:
        await engine.submit(ask("long", prompt=(1,) * (engine.info.n_ctx + 1)))
    assert (caught.value.n_prompt, caught.value.n_ctx) == (engine.info.n_ctx + 1, engine.info.n_ctx)
    with pytest.raises(InvalidRequest) as wrong:
        await engine.submit(ask("ids", prompt=(1, far)))
    assert wrong.value.param == "prompt"
    with pytest.raises(InvalidRequest) as wrong:
        await engine.submit(ask("bias", sampling=Sampling(logit_bias=((far, 1.0),))))
    assert wrong.value.param == "logit_bias"
    with pytest.raises(InvalidRequest) as wrong:
        await engine.submit(ask("allowed", sampling=Sampling(allowed_token_ids=(1, far))))
    assert wrong.value.param == "allowed_token_ids"
    with pytest.raises(RequestError) as unknown:
        await engine.submit(ask("types", speculate=Speculate(types=("warp",))))
    assert unknown.value.param == "speculative.types"
    await idle(engine)


async def leaving_frees(engine: AsyncEngine) -> None:
    stream = await engine.submit(ask("leave", max_tokens=None))
    await anext(stream)
    await stream.aclose()
    await idle(engine)
    with pytest.raises(StopAsyncIteration):
        await anext(stream)


async def leaving_early_frees(engine: AsyncEngine) -> None:
    """Before the first event, in a slot and in the queue."""
    streams = [await engine.submit(ask(f"early-{i}")) for i in range(engine.info.n_slots + 2)]
    for stream in reversed(streams):
        await stream.aclose()
    await idle(engine)


async def leaving_during_submit_frees(engine: AsyncEngine) -> None:
    for turns in range(5):
        task = asyncio.create_task(engine.submit(ask(f"submit-{turns}")))
        for _ in range(turns):
            await asyncio.sleep(0)
        task.cancel()
        for got in await asyncio.gather(task, return_exceptions=True):
            if not isinstance(got, BaseException):
                await got.aclose()
    await idle(engine)


async def leaving_disturbs_nobody(engine: AsyncEngine) -> None:
    alone, _ = await outcome(engine, ask("alone"))
    kept = await engine.submit(ask("kept"))
    left = await engine.submit(ask("left", prompt="five six seven"))
    await anext(left)
    await left.aclose()
    *deltas, end = await events_of(kept)
    assert isinstance(end, Done)
    assert "".join(one.text for one in deltas) == "".join(one.text for one in alone)


async def more_than_slots(engine: AsyncEngine) -> None:
    streams = [await engine.submit(ask(f"many-{i}")) for i in range(engine.info.n_slots + 2)]
    for events in await asyncio.gather(*(events_of(stream) for stream in streams)):
        assert isinstance(events[-1], Done)
    await idle(engine)


async def tokens_and_text(engine: AsyncEngine) -> None:
    ids = await engine.tokenize("one two", add_special=False, parse_special=True)
    assert ids
    assert all(0 <= one < engine.info.vocab_size for one in ids)
    assert await engine.detokenize(ids) == "one two"
    assert await engine.tokenize("", add_special=False, parse_special=False) == []


LONG = "class Stack: def push(self, value): pass " * 12  # more than a page


async def slots_are_saved_restored_and_erased(engine: AsyncEngine) -> None:
    await idle(engine)
    await outcome(engine, ask("saved", prompt=LONG, slot=0))
    saved = await engine.save_slot(0, "contract", "")
    assert saved.n_tokens > 0
    assert saved.n_bytes > saved.n_tokens
    assert saved.seconds >= 0
    restored = await engine.restore_slot(1, "contract", "")
    assert (restored.n_tokens, restored.n_bytes) == (saved.n_tokens, saved.n_bytes)
    again = await engine.save_slot(1, "contract again", "")
    assert again.n_tokens == saved.n_tokens, "the slot has the sequence now"
    assert await engine.erase_slot(1, "") >= saved.n_tokens
    assert await engine.erase_slot(1, "") == 0
    with pytest.raises(InvalidRequest) as nothing:
        await engine.save_slot(1, "contract", "")
    assert nothing.value.param == "id_slot"


async def saved_slots_belong_to_their_tenant(engine: AsyncEngine) -> None:
    await idle(engine)
    await outcome(engine, ask("mine", prompt=LONG, tenant="me", slot=0))
    with pytest.raises(InvalidRequest) as nothing:
        await engine.save_slot(0, "theirs", "you")
    assert nothing.value.param == "id_slot"
    await engine.save_slot(0, "mine", "me")
    for tenant in ("you", ""):
        with pytest.raises(SlotFileRefused) as refused:
            await engine.restore_slot(1, "mine", tenant)
        assert refused.value.param == "filename"
        assert await engine.erase_slot(0, tenant) == 0
    assert (await engine.restore_slot(0, "mine", "me")).n_tokens > 0


async def slots_and_names_that_cannot_be_are_refused(engine: AsyncEngine) -> None:
    await idle(engine)
    n_slots = engine.info.n_slots
    for refused in (
        engine.save_slot(n_slots, "a", ""),
        engine.restore_slot(n_slots, "a", ""),
        engine.erase_slot(n_slots, ""),
    ):
        with pytest.raises(RequestError):
            await refused
    for name in ("", "..", ".hidden", "a/b", "../a", "/etc/passwd"):
        for call in (engine.save_slot, engine.restore_slot):
            with pytest.raises(InvalidRequest) as wrong:
                await call(0, name, "")
            assert wrong.value.param == "filename"
    with pytest.raises(SlotFileRefused):
        await engine.restore_slot(0, "never saved", "")


async def a_busy_slot_is_saved_but_not_replaced(engine: AsyncEngine) -> None:
    await idle(engine)
    await outcome(engine, ask("before", prompt=LONG, slot=0))
    await engine.save_slot(0, "busy", "")
    stream = await engine.submit(ask("busy", prompt=LONG, max_tokens=None))
    await anext(stream)
    assert (await engine.save_slot(0, "busy", "")).n_tokens > 0
    for refused in (engine.restore_slot(0, "busy", ""), engine.erase_slot(0, "")):
        with pytest.raises(InvalidRequest) as busy:
            await refused
        assert busy.value.param == "id_slot"
    await stream.aclose()
    await idle(engine)


async def draining_lets_finish(engine: AsyncEngine) -> None:
    running = asyncio.create_task(events_of(await engine.submit(ask("running"))))
    draining = asyncio.create_task(engine.drain(LIMIT_S))
    await asyncio.sleep(0)
    assert engine.status == "draining"
    with pytest.raises(EngineStopped):
        await engine.submit(ask("late"))
    assert isinstance((await running)[-1], Done)
    await draining
    await engine.close()
    await engine.close()


async def draining_fails_what_is_left(engine: AsyncEngine) -> None:
    running = asyncio.create_task(events_of(await engine.submit(ask("left", max_tokens=None))))
    async with asyncio.timeout(LIMIT_S):
        await engine.drain(0.0)
    last = (await running)[-1]
    assert isinstance(last, Done | Failed)
    assert isinstance(last, Done) or isinstance(last.error, EngineStopped)
    await engine.close()


async def closing_ends_streams(engine: AsyncEngine) -> None:
    stream = await engine.submit(ask("closed", max_tokens=None))
    await engine.close()
    last = (await events_of(stream))[-1]
    assert isinstance(last, Done | Failed)
    with pytest.raises(EngineStopped):
        await engine.submit(ask("after"))
    with pytest.raises(EngineStopped):
        await engine.speculation()


CHECKS: tuple[Check, ...] = (
    info_is_filled,
    ends_once,
    counts_add_up,
    logprobs_come_with_their_text,
    an_echo_comes_first,
    a_reply_goes_on_where_another_run_stopped,
    a_prompts_progress_is_reported,
    a_slot_may_be_chosen,
    a_prompt_may_mix_ids_and_texts,
    prompt_ids_are_those_of_a_request,
    enough_is_enough,
    figures_are_sound,
    drafting_is_reported,
    sources_name_drafters,
    steps_are_told,
    seed_is_told,
    same_seed_same_text,
    speculation_only_narrows,
    ngram_settings_are_told,
    a_prediction_changes_no_text,
    slots_tell_drafters,
    steps_are_split,
    refuses_before_any_event,
    leaving_frees,
    leaving_early_frees,
    leaving_during_submit_frees,
    leaving_disturbs_nobody,
    more_than_slots,
    tokens_and_text,
    slots_are_saved_restored_and_erased,
    saved_slots_belong_to_their_tenant,
    slots_and_names_that_cannot_be_are_refused,
    a_busy_slot_is_saved_but_not_replaced,
)
ENDINGS: tuple[Check, ...] = (draining_lets_finish, draining_fails_what_is_left, closing_ends_streams)
