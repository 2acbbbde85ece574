"""An engine that says what a script tells it to. Implements `engine.api.AsyncEngine` without a model.

A script is a function from a request to steps: events, a number (wait so many seconds), or an exception to raise.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import count

from slipstream.engine.api import (
    Chat,
    Delta,
    Done,
    Echo,
    Event,
    Failed,
    Infill,
    ModelInfo,
    Progress,
    Prompt,
    Request,
    SlotFile,
    Speculation,
    Status,
    Timings,
    TokenLogprob,
    Usage,
)
from slipstream.engine.drafting import DrafterState, Drafting, PlaceBelief, WidthCost
from slipstream.engine.drafting import Step as Drafted
from slipstream.engine.errors import (
    ContextTooLong,
    DeviceLost,
    EngineStopped,
    InvalidRequest,
    Overloaded,
    SlotFileRefused,
    Unsupported,
)
from slipstream.engine.stats import DrafterCount, EngineStats, SlotState
from slipstream.engine.text.template import compile_template, render

Step = Event | float | Exception
Script = Callable[[Request], Iterable[Step]]

N_CTX = 512
VOCAB = 1000
N_MAX = 4
DRAFTERS = ("prediction", "draft-model", "ngram-simple")
INFO = ModelInfo(
    name="fake/model",
    path="/models/fake",
    architecture="FakeForCausalLM",
    n_params=1_000_000,
    weight_bytes=4_000_000,
    vocab_size=VOCAB,
    n_ctx=N_CTX,
    n_ctx_train=2048,
    n_slots=4,
    batch_size=128,
    n_pages=64,
    page_size=32,
    device="cpu",
    dtype="float32",
    drafters=DRAFTERS,
    chat_template=(
        "{% for one in messages %}<{{ one.role }}>{{ one.content }}{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    ),
    bos_token="<s>",
    eos_tokens=("</s>",),
    fingerprint="fake-1",
    created=1_700_000_000,
    sampling_defaults={"temperature": 1.0},
)
SEEING = replace(INFO, modalities=("text", "image"))


# Two drafters, of which the network is too slow.
DRAFTING = Drafting(
    why_not="network_too_slow",
    drafted_share=0.0,
    off_s=12.5,
    widths=[WidthCost(1, 0.01, 0.011, 0.5, 0.1), WidthCost(2, 0.012, 0.012, 7.0, 0.2)],
    gap_s=0.001,
    drafters={
        "draft-model": DrafterState("tried", 0.02, 0.003, 0.0001, [PlaceBelief(0, 0.5, 40)]),
        "ngram-simple": DrafterState("asked", 1.0, 0.00002, 0.0, [PlaceBelief(0, 0.25, 8)]),
    },
    lengths=[30.0, 0.0, 0.5],
    n_lengths=[90, 0, 10],
    n_outcomes={"network_too_slow": 90, "drafted": 10},
)


# Of every slot that works: most tokens of a draft, who drafted last, the last steps.
LANE = (N_MAX, "ngram-simple", ((0, 0), (4, 3)))


def delta(text: str, *sources: str | None, first_id: int = 10) -> Delta:
    """One token per source; the text goes to the tokens in equal shares."""
    sources = sources or (None,)
    size = -(-len(text) // len(sources))
    pieces = tuple(text[i * size : (i + 1) * size] for i in range(len(sources)))
    return Delta(text, tuple(range(first_id, first_id + len(sources))), sources, pieces)


def counted(n_drafts: int, n_accepted: int) -> DrafterCount:
    """A drafter that made drafts of two tokens, of which the first was accepted in so many."""
    return DrafterCount(
        n_drafts=n_drafts,
        n_drafts_accepted=n_accepted,
        n_drafted=2 * n_drafts,
        n_accepted=n_accepted,
        drafted_by_position=(n_drafts, n_drafts),
        accepted_by_position=(n_accepted,) if n_accepted else (),
        n_begin_calls=1,
        n_draft_calls=n_drafts + 1,
        n_accept_calls=n_drafts + 2,
        begin_s=0.001,
        draft_s=0.002,
        accept_s=0.003,
    )


def guesser(request: Request) -> str:
    """The drafter that a request's drafts are ascribed to."""
    types = DRAFTERS if request.speculate.types is None else request.speculate.types
    return types[0] if request.prediction else types[-1]


def done(request: Request, n_completion: int = 3, reason: str = "stop", **changes: object) -> Done:
    """The end of a request that ran with the fake's speculation; by default every other draft was accepted."""
    asked = request.speculate
    types = DRAFTERS if asked.types is None else asked.types
    n_max = min(N_MAX, N_MAX if asked.n_max is None else asked.n_max) if types else 0
    n_accepted = n_completion // 2 if n_max else 0
    n_steps = n_completion - n_accepted
    histogram = [0] * (n_max + 1)
    histogram[0] = n_steps
    if n_accepted:
        histogram[0], histogram[1] = n_steps - n_accepted, n_accepted
    speculation = Speculation(
        types=types,
        n_max=n_max,
        n_min=min(asked.n_min or 0, n_max),
        p_min=asked.p_min or 0.0,
        n_steps=n_steps,
        histogram=tuple(histogram),
        drafters={guesser(request): counted(n_accepted, n_accepted)} if n_accepted else {},
        ngram_size_n=asked.ngram_size_n,
        ngram_size_m=asked.ngram_size_m,
        ngram_min_hits=asked.ngram_min_hits,
    )
    fields = {
        "reason": reason,
        "stop_string": None,
        "usage": Usage(n_prompt=prompt_length(request), n_cached=1, n_completion=n_completion),
        "timings": Timings(queue_s=0.001, prompt_s=0.02, generation_s=0.05 if n_completion > 1 else 0.0),
        "speculation": speculation,
        "seed": 7 if request.sampling.seed is None else request.sampling.seed,
    }
    return Done(**{**fields, **changes})


def prompt_length(request: Request) -> int:
    return len(ids_of(request.prompt))


def ids_of(prompt: Prompt) -> list[int]:
    """One token per word, and one at the start."""
    if isinstance(prompt, tuple):
        parts = [[one] if isinstance(one, int) else ids_of(one)[bool(i) :] for i, one in enumerate(prompt)]
        return [one for part in parts for one in part]
    if isinstance(prompt, Infill):
        words = [prompt.suffix, prompt.prefix]
    elif isinstance(prompt, Chat):
        words = [str(one.get("content")) for one in prompt.messages]
    else:
        words = [prompt]
    return [1, *(100 + len(word) for text in words for word in text.split())]


def told(token_id: int, text: str, n_top: int, offset: int = 0) -> TokenLogprob:
    """A token with made-up log-probabilities: it is the likeliest, the ids after it follow."""
    top = tuple(TokenLogprob(token_id + i, f"<{token_id + i}>".encode(), -0.5 - i) for i in range(n_top))
    return TokenLogprob(token_id, text.encode(), -0.5, top, offset, rank=1)


def echo(request: Request) -> Echo:
    """The prompt told back, one piece per token."""
    ids = tuple(ids_of(request.prompt))
    pieces = tuple(f"p{i} " for i in range(len(ids)))
    n_top = request.prompt_logprobs
    logprobs: tuple[TokenLogprob | None, ...] = ()
    if n_top is not None:
        logprobs = tuple(
            told(ids[i], piece, n_top, len("".join(pieces[:i]))) if i else None
            for i, piece in enumerate(pieces)
        )
    return Echo(ids, pieces, logprobs)


def stepped(index: int, text: str, drafted: str = "", n_accepted: int = 0, **changes: object) -> Delta:
    """The delta of a step that keeps the words of the text, so many of them drafted; token ids are words' lengths.

    drafted: the words of the draft.
    """
    kept, guessed = ([f"{word} " for word in words.split()] for words in (text, drafted))
    step = Drafted(
        index=index,
        drafter="ngram-simple" if guessed else None,
        token_ids=tuple(map(len, guessed)),
        pieces=tuple(guessed),
        n_accepted=n_accepted,
        why_not=None if guessed else "no_guess",
    )
    sources = ("ngram-simple",) * n_accepted + (None,) * (len(kept) - n_accepted)
    told = Delta("".join(kept), tuple(map(len, kept)), sources, tuple(kept))
    return replace(told, steps=(replace(step, **changes),))


def _step_of(index: int, ids: range, sources: Sequence[str | None]) -> Drafted:
    """What a step of `words` drafted: the tokens after its first, and one more that was rejected."""
    drafter = next((one for one in sources if one is not None), None)
    if drafter is None:
        return Drafted(index, why_not="no_guess")
    drafted = (*ids[1:], 99)
    return Drafted(index, drafter, drafted, tuple(f"w{i} " for i in drafted), len(drafted) - 1)


def words(request: Request, delay_s: float = 0.0) -> Iterator[Step]:
    """`w0 w1 … w9`, three tokens a step, cut at max_tokens; the second and third token of a step were drafted."""
    n_max = 10 if request.max_tokens is None else min(10, request.max_tokens)
    n_prompt, n_emitted = prompt_length(request), len(request.emitted)
    if request.progress and not n_emitted:
        yield from (
            Progress(n_prompt, 1, n, 0.01 * n, request.slot or 0)
            for n in sorted({1, n_prompt // 2 + 1, n_prompt})
        )
    first = "prediction" if request.prediction else "ngram-simple"
    if (request.echo or request.prompt_logprobs is not None) and not n_emitted:
        yield echo(request)
    for start in range(n_emitted, n_max, 3):
        ids = range(start, min(start + 3, n_max))
        texts, sources = [f"w{i} " for i in ids], (None, first, "draft-model")[: len(ids)]
        if delay_s:
            yield delay_s
        yield Delta(
            "".join(texts),
            tuple(ids),
            sources,
            tuple(texts),
            ()
            if request.logprobs is None
            else tuple(
                told(start + i, text, request.logprobs, 3 * (start + i)) for i, text in enumerate(texts)
            ),
            (_step_of(start // 3, ids, sources),) if request.steps else (),
        )
    yield done(request, n_max, "stop" if n_max == 10 else "length", slot=request.slot or 0)


class FakeStream:
    """Plays a script. `closed` tells that the server let go of it."""

    def __init__(self, engine: FakeEngine, request: Request) -> None:
        self.prompt_ids = ids_of(request.prompt)
        self.prompt_tail = engine.prompt_tail
        self.request = request
        self.closed = False
        self.ended = False
        self.asked_to_finish = False
        self._n_more = 1  # steps that still come once it is asked to finish
        self._n_told = 0
        self._is_waiting = False
        self._engine = engine
        self._steps = iter(engine.script(request))

    def __aiter__(self) -> AsyncIterator[Event]:
        return self

    async def __anext__(self) -> Event:
        if self.ended or self.closed:
            raise StopAsyncIteration
        self._is_waiting = True
        try:
            event = await self._next()
        except asyncio.CancelledError:
            await asyncio.sleep(0.02)  # a real engine needs a moment too
            raise
        finally:
            self._is_waiting = False
        if isinstance(event, Done | Failed):
            self._finish()
        return event

    async def _next(self) -> Event:
        for step in self._steps:
            if self._engine.stopped.is_set():
                break
            if self.asked_to_finish and not isinstance(step, Done | Failed) and self._n_more == 0:
                return done(self.request, self._n_told)
            if isinstance(step, float | int):
                await self._wait(step)
                continue
            if isinstance(step, Exception):
                self._finish()
                raise step
            if isinstance(step, Delta):
                self._n_told += len(step.token_ids)
                self._n_more -= self.asked_to_finish
            return step
        if self._engine.stopped.is_set():
            return Failed(EngineStopped("stopped"))
        self._finish()
        raise StopAsyncIteration

    async def _wait(self, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._engine.stopped.wait(), seconds)

    def _finish(self) -> None:
        self.ended = True
        self._engine.running.discard(self)

    def finish(self) -> None:
        """One more step comes, then the end."""
        self.asked_to_finish = True

    async def aclose(self) -> None:
        if self._is_waiting:
            # Like an async generator.
            raise RuntimeError("aclose() while an event is being awaited")
        await asyncio.sleep(0)  # like a real engine, closing reaches another task
        self.closed = True
        self._engine.running.discard(self)


class FakeEngine:
    """Unlimited slots, a countable queue. `refusal` is raised by the next submits; `status` may be set."""

    def __init__(self, script: Script = words, max_running: int = 1000) -> None:
        self.script = script
        self.max_running = max_running
        self.info = INFO
        self.status: Status = "ready"
        self.device_loss: DeviceLost | None = None
        self.step_age_s = 0.0
        self.refusal: Exception | None = None
        self.requests: list[Request] = []
        self.streams: list[FakeStream] = []
        self.running: set[FakeStream] = set()
        self.stopped = asyncio.Event()
        self.render_error: Exception | None = None
        self.prompt_tail = "<assistant>"
        self.last: dict[int, tuple[str, int]] = {}  # slot -> whose sequence it had last, and its tokens
        self.files: dict[tuple[str, str], int] = {}  # (tenant, file name) -> tokens
        self._ids = count()

    async def submit(self, request: Request) -> FakeStream:
        if self.status != "ready":
            raise self.device_loss or EngineStopped("not ready")
        if self.refusal:
            raise self.refusal
        self._check(request)
        if len(self.running) >= self.max_running:
            raise Overloaded("many wait", 1.5)
        stream = FakeStream(self, request)
        self.requests.append(request)
        self.streams.append(stream)
        self.last[min(len(self.running), INFO.n_slots - 1)] = request.tenant, len(stream.prompt_ids)
        self.running.add(stream)
        return stream

    def _check(self, request: Request) -> None:
        n_prompt = prompt_length(request)
        if n_prompt >= self.info.n_ctx:
            raise ContextTooLong(n_prompt, self.info.n_ctx)
        unknown = [one for one in request.speculate.types or () if one not in DRAFTERS]
        if unknown:
            raise Unsupported("speculative.types", f"{unknown[0]} is not loaded")
        self._check_ids(request.prompt)
        if request.slot is not None and request.slot >= INFO.n_slots:
            raise InvalidRequest("id_slot", f"there is no slot {request.slot}")
        if any(isinstance(token, int) and token >= VOCAB for token, _ in request.sampling.logit_bias):
            raise InvalidRequest("logit_bias", f"a token id is outside the vocabulary (0 … {VOCAB - 1})")
        if any(one >= VOCAB for one in request.sampling.allowed_token_ids or ()):
            raise InvalidRequest(
                "allowed_token_ids", f"a token id is outside the vocabulary (0 … {VOCAB - 1})"
            )
        if request.emitted and request.sampling.seed is None:
            raise InvalidRequest("seed", "is needed to go on with a reply")
        if any(one >= VOCAB for one in request.stop_token_ids):
            raise InvalidRequest("stop_token_ids", f"a token id is outside the vocabulary (0 … {VOCAB - 1})")

    def _check_ids(self, prompt: Prompt) -> None:
        ids = prompt if isinstance(prompt, tuple) else ()
        if any(isinstance(one, int) and one >= VOCAB for one in ids):
            raise InvalidRequest("prompt", f"a token id is outside the vocabulary (0 … {VOCAB - 1})")

    async def prompt_ids(self, prompt: Prompt) -> list[int]:
        self._check_ids(prompt)
        token_ids = ids_of(prompt)
        if len(token_ids) >= self.info.n_ctx:
            raise ContextTooLong(len(token_ids), self.info.n_ctx)
        return token_ids

    async def tokenize(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
        return ([1] if add_special else []) + [ord(char) for char in text]

    async def detokenize(self, token_ids: Sequence[int]) -> str:
        if any(one >= VOCAB for one in token_ids):
            raise InvalidRequest("tokens", f"a token id is outside the vocabulary (0 … {VOCAB - 1})")
        return "".join(chr(one) for one in token_ids)

    async def token_bytes(self, token_ids: Sequence[int]) -> list[bytes]:
        """A token writes one byte, so that a character beyond ASCII is written by no token."""
        return [bytes([one % 256]) for one in token_ids]

    async def render(self, chat: Chat) -> str:
        if self.render_error:
            raise self.render_error
        template = compile_template(self.info.chat_template or "", "")
        return render(
            template,
            {
                "tools": None,
                **chat.template_kwargs,
                "messages": chat.messages,
                "add_generation_prompt": chat.add_generation_prompt,
            },
        )

    def stats(self) -> EngineStats:
        busy = [stream.request for stream in self.running][: INFO.n_slots]
        idle = range(len(busy), INFO.n_slots)
        return EngineStats(
            slots=(
                *(
                    SlotState(
                        i, True, one.id, 5, 7, 1, 2, -1, {"ngram-simple": counted(2, 1)}, one.tenant, *LANE
                    )
                    for i, one in enumerate(busy)
                ),
                *(SlotState(i, False, None, 0, 0, 0, 0, -1) for i in idle),
            ),
            n_waiting=max(0, len(self.running) - INFO.n_slots),
            n_pages_free=60,
            n_pages_cached=2,
            n_pages_held=2,
            n_steps=11,
            n_prompt_tokens=20,
            n_completion_tokens=30,
            drafters={"ngram-simple": counted(10, 5), "prediction": counted(3, 0)},
            n_preempted=0,
            disabled_drafters=(),
            step_s={"forward": 2.5, "keep": 0.25},
            step_average_s={"forward": 0.0015, "keep": 0.000_125},
        )

    async def speculation(self) -> Drafting:
        if self.stopped.is_set():
            raise EngineStopped("stopped")
        return DRAFTING

    async def save_slot(self, slot_id: int, filename: str, tenant: str) -> SlotFile:
        self._check_slot(slot_id)
        self._check_name(filename)
        whose, n_tokens = self.last.get(slot_id, ("", 0))
        if whose != tenant or not n_tokens:
            raise InvalidRequest("id_slot", f"of slot {slot_id} nothing is cached")
        self.files[tenant, filename] = n_tokens
        return SlotFile(n_tokens, 100 * n_tokens, 0.0125)

    async def restore_slot(self, slot_id: int, filename: str, tenant: str) -> SlotFile:
        self._check_slot(slot_id, idle=True)
        self._check_name(filename)
        if (tenant, filename) not in self.files:
            raise SlotFileRefused(f"there is no saved slot {filename}")
        n_tokens = self.files[tenant, filename]
        self.last[slot_id] = tenant, n_tokens
        return SlotFile(n_tokens, 100 * n_tokens, 0.0125)

    async def erase_slot(self, slot_id: int, tenant: str) -> int:
        self._check_slot(slot_id, idle=True)
        whose, n_tokens = self.last.get(slot_id, ("", 0))
        if whose != tenant:
            return 0
        self.last.pop(slot_id, None)
        return n_tokens

    def _check_slot(self, slot_id: int, *, idle: bool = False) -> None:
        if slot_id >= INFO.n_slots:
            raise InvalidRequest("id_slot", f"there is no slot {slot_id}")
        if idle and slot_id < len(self.running):
            raise InvalidRequest("id_slot", f"slot {slot_id} is busy")

    def _check_name(self, filename: str) -> None:
        if not filename or "/" in filename or filename.startswith("."):
            raise InvalidRequest("filename", "is no plain name")

    async def drain(self, timeout_s: float) -> None:
        self.status = "draining"
        loop = asyncio.get_running_loop()
        end = loop.time() + timeout_s
        while self.running and loop.time() < end:
            await asyncio.sleep(0.01)
        self.stopped.set()
        while self.running:
            await asyncio.sleep(0.01)

    async def close(self) -> None:
        self.status = "draining"
        self.stopped.set()
