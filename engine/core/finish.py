"""What a slot keeps of a verdict, and how its request ends.

Tokens are kept one at a time, so that an end token, a stop string or the length limit inside an accepted run
cuts text, ids and counts at the same place.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import replace
from functools import partial
from itertools import accumulate

from slipstream.engine.api import Delta, Done, Echo, Progress, Speculation, Timings, TokenLogprob, Usage
from slipstream.engine.drafting import Step
from slipstream.engine.errors import EngineError, InvalidRequest, StepFailed
from slipstream.engine.sample.logprobs import Logprob
from slipstream.engine.sample.pick import bans_all_allowed
from slipstream.engine.slot import Ending, Slot, SlotStats
from slipstream.engine.speculate.drafter import Draft
from slipstream.engine.speculate.verify import Verdict
from slipstream.engine.text.text_stream import N_CHARACTER


def keep(
    slot: Slot, draft: Draft, verdict: Verdict, eos_ids: Set[int], now_s: float
) -> tuple[Delta, Ending | None]:
    """Append the verdict's tokens to the slot until the request ends; return what the client sees of them.

    Of tokens of an earlier run (`Request.emitted`) the client has seen all but log-probabilities that waited for text:
    `unsent` is the rest.
    """
    token_ids: list[int] = []
    pieces: list[str] = []
    ending = None
    for token_id in verdict.token_ids:
        if token_id < 0:
            ending = Ending.BROKEN
            break
        if len(slot.tokens) >= slot.n_limit:  # a reply of no tokens, for the prompt's sake
            ending = Ending.LIMIT
            break
        slot.append(token_id)
        token_ids.append(token_id)
        ends = token_id in eos_ids or token_id in slot.request.stop_token_ids
        may_stop = slot.n_decoded > slot.request.min_tokens
        is_text = not ends or slot.request.include_stop
        pieces.append(slot.text.push(token_id, may_stop=may_stop) if is_text else "")
        if slot.n_decoded <= slot.n_emitted:
            slot.text.begun()  # of these the client has the log-probabilities
        ending = Ending.END_TOKEN if ends else _ending(slot)
        if ending is not None:
            break
    if token_ids or ending is Ending.LIMIT:
        slot.stats.first_token_s = slot.stats.first_token_s or now_s
        slot.stats.last_token_s = now_s
    if ending not in (None, Ending.BROKEN) and pieces:
        is_left_out = ending is Ending.END_TOKEN and not slot.request.include_stop
        pieces[-1] += slot.text.flush(n_left_out=int(is_left_out))
    n = len(token_ids)
    sources = tuple(draft.sources[i] if i < verdict.n_accepted else None for i in range(n))
    told = _told(slot, verdict.logprobs[:n])
    steps = (_step(slot, draft, n, min(n, verdict.n_accepted)),) if slot.request.steps else ()
    return Delta("".join(pieces), tuple(token_ids), sources, tuple(pieces), told, steps), ending


def unsent(slot: Slot, delta: Delta) -> list[Delta]:
    """What `keep` has just returned, without the tokens that an earlier run has sent; nothing if it sent them all."""
    n_sent = slot.n_emitted - (slot.n_decoded - len(delta.token_ids))
    if n_sent <= 0:
        return [delta]
    if n_sent >= len(delta.token_ids):
        return []
    pieces = delta.pieces[n_sent:]
    ids, sources = delta.token_ids[n_sent:], delta.sources[n_sent:]
    return [replace(delta, text="".join(pieces), token_ids=ids, sources=sources, pieces=pieces)]


def _step(slot: Slot, draft: Draft, n_kept: int, n_accepted: int) -> Step:
    """What the step has drafted, now that the slot has kept so many tokens of it."""
    n_before = len(slot.tokens) - n_kept
    before = slot.tokens[max(0, n_before - N_CHARACTER) : n_before]
    return Step(
        index=slot.stats.n_steps,
        drafter=draft.author,
        token_ids=draft.token_ids,
        pieces=slot.text.guessed(before, draft.token_ids),
        n_accepted=n_accepted,
        why_not=None if draft else slot.speculate.why_not or draft.why_not,
    )


def _ending(slot: Slot) -> Ending | None:
    if slot.text.stopped is not None:
        return Ending.STOP_STRING
    if slot.constraint is not None and slot.constraint.complete:
        return Ending.COMPLETE
    if len(slot.tokens) >= slot.n_limit:
        return Ending.LIMIT
    return None


def _told(slot: Slot, judged: Sequence[Logprob]) -> tuple[TokenLogprob, ...]:
    """The log-probabilities that go with the text that the client sees now; judged: those of the latest tokens.

    A token without text has none, except behind an echoed prompt: who asks for one counts tokens.
    """
    if slot.request.logprobs is None:
        return ()
    slot.judged.update(enumerate(judged, slot.n_decoded - len(judged)))
    begun = slot.text.begun()
    if slot.n_decoded <= slot.n_emitted:
        return ()
    return tuple(
        _entry(slot, slot.judged[place.number], place.offset)
        for place in begun
        if place.has_text or slot.request.echo
    )


def _entry(slot: Slot, one: Logprob, offset: int) -> TokenLogprob:
    """A log-probability as the client reads it."""
    data = slot.text.token_bytes
    top = tuple(TokenLogprob(token_id, data(token_id), value) for token_id, value in one.top)
    return TokenLogprob(one.token_id, data(one.token_id), one.logprob, top, offset, one.rank)


def echo(slot: Slot, start: int, judged: Sequence[Logprob], *, is_complete: bool) -> Echo | None:
    """The prompt sent back, with what the model said of it, if that is asked and all of it is computed.

    judged: what a pass said of the prompt's tokens from position `start` + 1 on. A slot that started over computes some
    of them again; those are skipped.
    """
    if slot.prompt_logprobs is not None:
        slot.prompt_logprobs += judged[len(slot.prompt_logprobs) - start :]
    if not slot.echoes or not is_complete:
        return None
    prompt = slot.tokens[: slot.n_prompt]
    pieces = slot.text.pieces(prompt)
    offsets = accumulate(map(len, pieces))  # of the tokens from the second on
    told: tuple[TokenLogprob | None, ...] = ()
    if slot.prompt_logprobs is not None:
        told = (None, *map(partial(_entry, slot), slot.prompt_logprobs, offsets))
    slot.echoes, slot.prompt_logprobs = False, None
    return Echo(tuple(prompt), tuple(pieces), told)


def progress(slot: Slot, n_past: int, now_s: float) -> Progress | None:
    """How far the prompt is now that `n_past` tokens have been through the target, if that is asked for.

    A slot that started over computes again what was reported: nothing is said until it is further than before.
    """
    n_processed = min(n_past, slot.n_prompt)
    if not slot.request.progress or n_processed <= slot.n_reported:
        return None
    slot.n_reported = n_processed
    is_begun = n_processed > slot.stats.n_cached
    seconds = now_s - slot.stats.started_s if is_begun else 0.0
    return Progress(slot.n_prompt, slot.stats.n_cached, n_processed, seconds, slot.id)


def done(slot: Slot, ending: Ending, rounds_s: tuple[float, float], *, synthetic: bool = False) -> Done:
    """The last event of a finished request. rounds_s: as `Clock.rounds_s`."""
    stats, speculate = slot.stats, slot.speculate
    n_image = sum(one.layout.n_tokens for one in slot.images)
    return Done(
        reason="length" if ending is Ending.LIMIT else "stop",
        stop_string=slot.text.stopped if ending is Ending.STOP_STRING else None,
        stop_token=slot.tokens[-1]
        if slot.n_decoded and slot.tokens[-1] in slot.request.stop_token_ids
        else None,
        usage=Usage(slot.n_prompt, stats.n_cached, slot.n_decoded, n_image),
        timings=_timings(stats, rounds_s),
        speculation=Speculation(
            types=speculate.types,
            n_max=speculate.n_max,
            n_min=speculate.n_min,
            p_min=speculate.p_min,
            n_steps=sum(stats.histogram),
            histogram=tuple(stats.histogram),
            drafters={name: tally.count() for name, tally in stats.drafters.items()},
            ngram_size_n=speculate.ngram_size_n,
            ngram_size_m=speculate.ngram_size_m,
            ngram_min_hits=speculate.ngram_min_hits,
            synthetic=synthetic,
        ),
        seed=slot.sampling.seed,
        slot=slot.id,
    )


def _timings(stats: SlotStats, rounds_s: tuple[float, float]) -> Timings:
    """Seconds of the request's phases; a step's parts and its tokens' times are not taken at the same moment."""
    first_token_s = stats.first_token_s or stats.started_s  # all tokens may be an earlier run's
    generation_s = max(0.0, stats.last_token_s - first_token_s)
    draft_s = min(rounds_s[0] - stats.rounds_s[0], generation_s)
    return Timings(
        queue_s=stats.started_s - stats.admitted_s,
        prompt_s=first_token_s - stats.started_s,
        generation_s=generation_s,
        draft_s=draft_s,
        verify_s=min(rounds_s[1] - stats.rounds_s[1], generation_s - draft_s),
    )


def broken(slot: Slot) -> EngineError:
    """What is wrong where no token could be picked."""
    constraint, grammar = slot.constraint, slot.request.grammar
    if constraint is not None and grammar is not None and constraint.failure is not None:
        return InvalidRequest(grammar.param, f"cannot be followed any further: {constraint.failure}")
    if (param := bans_all_allowed(slot.row())) is not None:
        asked = slot.request.sampling
        if param == "logit_bias" and asked.bad_words and not asked.logit_bias:
            param = "bad_words"  # those of one token are biases
        return InvalidRequest(param, "bans every token that is allowed here")
    return StepFailed("the model's output is not a number for this request")
