"""The replies of `/completion` and `/infill` in llama-server's form: an object per choice, whole or as events.

A stream has no `[DONE]`: the last object of a choice has `stop` true.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import orjson

from slipstream.engine.api import Delta, Done, Echo, EventStream, ModelInfo, Progress, TokenLogprob
from slipstream.server.http.error_table import Refused
from slipstream.server.http.sse import event
from slipstream.server.openai import figures
from slipstream.server.openai import wire_logprobs as logprobs
from slipstream.server.openai.formats.format import Content, Piece
from slipstream.server.openai.job import Happened, Job, delta_of
from slipstream.server.openai.progress import TimingsSoFar
from slipstream.server.openai.readers import SAMPLERS

if TYPE_CHECKING:
    from slipstream.server.native.generation import NativeRequest

# Fields of `Sampling` that are shown as they were given, else as the server has them.
SAMPLED = (
    *("temperature", "top_k", "top_p", "min_p", "repeat_penalty", "repeat_last_n"),
    *("presence_penalty", "frequency_penalty"),
)


@dataclass(slots=True)
class _Choice:
    """What is there of a choice."""

    text: Any  # its `ReplyText`
    n_prompt: int
    timings: TimingsSoFar
    content: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    judged: list[TokenLogprob] = field(default_factory=list)
    slot: int = -1

    def add(self, pieces: Iterable[Piece]) -> str:
        """The text of pieces, all of which are content."""
        text = "".join(one.text for one in pieces if isinstance(one, Content))
        self.content.append(text)
        return text


class NativeReply:
    """A `Reply`."""

    closing = b""

    def __init__(
        self,
        job: Job,
        info: ModelInfo,
        streams: Sequence[EventStream],
        *,
        wire: NativeRequest,
        prompts: Sequence[str] = (),
    ) -> None:
        """prompts: the text of each prompt, as the last object repeats it."""
        self._job = job
        self._info = info
        self._wire = wire
        self._prompts = prompts
        self._choices = [
            _Choice(job.wanted.text(one.prompt_tail), len(one.prompt_ids), TimingsSoFar(job))
            for one in streams
        ]

    def is_ended(self, index: int) -> bool:
        return bool(self._choices[index].text.is_ended)

    def opening(self) -> Iterable[bytes]:
        return ()

    def piece(self, index: int, happened: Happened) -> Iterable[bytes]:
        one = self._choices[index]
        if isinstance(happened, Progress):
            one.slot = happened.slot
            told = one.timings.prompt(happened)
            return () if told is None else (event(self._chunk(index, "", ()) | told),)
        content, delta = self._add(index, delta_of(happened))
        chunk = self._chunk(index, content, delta.token_ids) | one.timings.after(delta)
        if self._job.wanted.logprobs is not None:
            chunk["completion_probabilities"] = [_judged(each) for each in delta.logprobs]
        return (event(chunk),)

    def keep(self, index: int, happened: Echo | Delta) -> None:
        self._add(index, delta_of(happened))

    def end(self, index: int, ends: Mapping[int, Done]) -> Iterable[bytes]:
        one = self._choices[index]
        if held := one.add(one.text.finish()):
            yield event(self._chunk(index, held, ()))
        yield event(self._last(index, ends[index]) | {"content": "", "tokens": []})

    def whole(self, ends: Sequence[Done]) -> bytes:
        for one in self._choices:
            one.add(one.text.finish())
        objects = [self._chosen(self._last(index, end)) for index, end in enumerate(ends)]
        return orjson.dumps(objects[0] if len(objects) == 1 else objects)

    def failed(self, problem: Refused) -> bytes:
        return event(problem.content())

    def _add(self, index: int, given: Delta) -> tuple[str, Delta]:
        """The text that a step adds, and the step up to the text's end."""
        one = self._choices[index]
        pieces, delta = one.text.read(given)
        one.token_ids += delta.token_ids
        one.judged += delta.logprobs
        return one.add(pieces), delta

    def _chunk(self, index: int, content: str, token_ids: Sequence[int]) -> dict[str, Any]:
        one = self._choices[index]
        return {
            "index": index,
            "content": content,
            "tokens": list(token_ids),
            "stop": False,
            "id_slot": one.slot,
            "tokens_predicted": len(one.token_ids),
            "tokens_evaluated": one.n_prompt,
        }

    def _last(self, index: int, end: Done) -> dict[str, Any]:
        """The whole object of a choice that has ended."""
        one, wire, usage = self._choices[index], self._wire, end.usage
        content, n_total = "".join(one.content), usage.n_prompt + usage.n_completion
        stop_type = "limit" if one.text.reason(end) == "length" else "eos"
        last = {
            "index": index,
            "content": content,
            "tokens": one.token_ids if wire.return_tokens else [],
            "id_slot": end.slot,
            "stop": True,
            "model": self._info.name,
            "tokens_predicted": usage.n_completion,
            "tokens_evaluated": usage.n_prompt,
            "generation_settings": settings_of(self._job, index, end, self._info, wire.samplers),
            "prompt": self._prompts[index // self._job.n] if self._prompts else "",
            "has_new_line": "\n" in content,
            "truncated": end.reason == "length" and n_total >= self._info.n_ctx,
            "stop_type": "word" if end.stop_string is not None else stop_type,
            "stopping_word": end.stop_string or "",
            "tokens_cached": n_total,
            **figures.extras([end], 1),
        }
        if self._job.wanted.logprobs is not None and not self._job.stream:
            last["completion_probabilities"] = [_judged(each) for each in one.judged]
        return last

    def _chosen(self, last: dict[str, Any]) -> dict[str, Any]:
        """The fields that the request wants, under the names by which it asked for them."""
        paths = self._wire.response_fields
        return last if not paths else {path: one for path in paths for one in _found(last, path.split("/"))}


def _found(value: Any, keys: Sequence[str]) -> list[Any]:
    """What lies at the end of a path; empty if there is no such place."""
    for key in keys:
        if not isinstance(value, dict) or key not in value:
            return []
        value = value[key]
    return [value]


def _judged(one: TokenLogprob) -> dict[str, Any]:
    """A token of `completion_probabilities`."""
    entry = {"id": one.token_id, **logprobs.entry(one)}
    return entry | {"top_logprobs": [{"id": each.token_id, **logprobs.entry(each)} for each in one.top]}


def settings_of(
    job: Job, index: int, end: Done, info: ModelInfo, samplers: Sequence[str] | None
) -> dict[str, Any]:
    """`generation_settings`: what was in force for a choice. samplers: those the request names; None: all."""
    request, run = job.requests[index], end.speculation
    asked = request.sampling
    given = {name: getattr(asked, name) for name in SAMPLED}
    n_predict = -1 if request.max_tokens is None else request.max_tokens
    return {
        **info.sampling_defaults,
        **{name: value for name, value in given.items() if value is not None},
        "seed": end.seed,
        "n_predict": n_predict,
        "max_tokens": n_predict,
        "min_tokens": request.min_tokens,
        "stop": list(request.stop),
        "ignore_eos": asked.ignore_eos,
        "logit_bias": [{"token": token, "bias": bias} for token, bias in _finite(asked.logit_bias)],
        "n_probs": request.logprobs or 0,
        "samplers": list(SAMPLERS if samplers is None else samplers),
        "stream": job.stream,
        "timings_per_token": job.timings,
        "grammar": request.grammar.source if request.grammar else "",
        "speculative.types": ",".join(run.types),
        "speculative.n_max": run.n_max,
        "speculative.n_min": run.n_min,
        "speculative.p_min": run.p_min,
    }


def _finite(bias: Sequence[tuple[int | str, float]]) -> list[tuple[int | str, float | bool]]:
    """Biases as a request would give them: false bans a token."""
    return [(token, False if amount == float("-inf") else amount) for token, amount in bias]
