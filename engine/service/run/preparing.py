"""Requests before the engine's thread sees them: templates, tokenising and grammars, on worker threads."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import TypeVar

from slipstream.engine.api import Chat, Infill, ModelInfo, Prompt, Request
from slipstream.engine.core.slot_factory import Prepared
from slipstream.engine.errors import ContextTooLong, InvalidRequest, TimedOut
from slipstream.engine.service.run import showing
from slipstream.engine.service.run.admission import n_chars_of
from slipstream.engine.service.run.showing import Shown, Sight
from slipstream.engine.slot import Slot
from slipstream.engine.text.chat import ChatTemplate
from slipstream.engine.text.grammar.constraint import Constraint
from slipstream.engine.text.grammar.grammars import Grammars
from slipstream.engine.text.text_stream import TextStream
from slipstream.engine.text.thinking import Cut, CutThinking, cut_of
from slipstream.engine.text.tokenizer import Tokenizer

_N_TAIL = 64  # tokens of a prompt that say how it ends
_SHORT_TEXT = 1 << 15  # characters, tokenised in some 20 ms
# Characters that are tokenised in the time in which a token of an earlier run is kept again.
_CHARS_OF_KEPT = 64
# What may be tokenised and made text at once beyond the context's size, for instance to count a document's tokens.
_TEXT_BYTES, _TEXT_TOKENS = 1 << 20, 1 << 16

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Text:
    """The text side of a loaded checkpoint."""

    tokenizer: Tokenizer
    template: ChatTemplate | None
    grammars: Grammars
    sight: Sight
    suppressed: tuple[int, ...] = ()  # tokens that are banned unless a request says otherwise


@dataclass(frozen=True, slots=True)
class _Made:
    """What a worker makes of a request; images and constraint are awaited behind it."""

    prepared: Prepared
    shown: Shown
    tail: str  # how the prompt ends
    constraint: Future[Constraint] | None
    cut: Cut | None  # of its thinking


class Preparing:
    """Makes of texts what the engine takes, without holding up its thread or the event loop."""

    def __init__(self, text: Text, info: ModelInfo, limit_s: float) -> None:
        """limit_s: seconds that a request may take in all, which preparing counts on; 0: no limit."""
        self._text = text
        self._info = info
        self._limit_s = limit_s
        self._workers = ThreadPoolExecutor(max_workers=2, thread_name_prefix="prepare")
        self._long_workers = ThreadPoolExecutor(max_workers=1, thread_name_prefix="prepare-long")

    async def prepared(self, request: Request, admitted_s: float) -> tuple[Prepared, str]:
        """What the request's texts are to the engine, and how its prompt ends. Raises `RequestError`, `TimedOut`.

        admitted_s: now, on the engine's clock.
        """
        n_chars = n_chars_of(request.prompt) + len(request.prediction or "")
        async with self._in_time():
            made = await self._in_worker(lambda: self._prepare(request, admitted_s), n_chars)
            prepared, sight = made.prepared, self._text.sight
            if made.shown.images:
                images, drafts = await asyncio.gather(
                    made.shown.placed(sight.target), made.shown.placed(sight.draft)
                )
                prepared = replace(prepared, images=images, draft_images=drafts)
            rules: Constraint | None = None
            if made.constraint is not None:
                rules = await asyncio.wrap_future(made.constraint)
            prepared = replace(prepared, constraint=rules if made.cut is None else self._cut(made.cut, rules))
        return prepared, made.tail

    async def resolved(self, resolve: Callable[[], Slot], n_emitted: int) -> Slot:
        """The request's slot, with so many tokens of an earlier run. Raises what `resolve` raises, `TimedOut`."""
        if not n_emitted:
            return resolve()
        async with self._in_time():
            return await self._in_worker(resolve, _CHARS_OF_KEPT * n_emitted)

    async def prompt_ids(self, prompt: Prompt) -> list[int]:
        return await self._in_worker(lambda: self._shown(prompt).token_ids, n_chars_of(prompt))

    async def tokenize(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
        tokenizer = self._text.tokenizer
        n_tokens = max(self._info.n_ctx, _TEXT_BYTES // tokenizer.longest)
        tokenizer.check_size("content", text, n_tokens)
        return await self._in_worker(
            lambda: tokenizer.encode(text, add_special=add_special, parse_special=parse_special), len(text)
        )

    async def detokenize(self, token_ids: Sequence[int]) -> str:
        self._check_tokens(token_ids)
        return await self._in_worker(lambda: self._text.tokenizer.decode(token_ids, skip_special=False))

    async def token_bytes(self, token_ids: Sequence[int]) -> list[bytes]:
        self._check_tokens(token_ids)
        written = self._text.tokenizer.token_bytes
        return await self._in_worker(lambda: [written(one) for one in token_ids])

    def _cut(self, cut: Cut, rules: Constraint | None) -> CutThinking:
        return CutThinking(cut, rules, self._text.tokenizer.token_bytes, -(-self._info.vocab_size // 32))

    def _check_tokens(self, token_ids: Sequence[int]) -> None:
        most = max(self._info.n_ctx, _TEXT_TOKENS)
        if len(token_ids) > most:
            raise InvalidRequest("tokens", f"{len(token_ids)} at once; at most {most} (--ctx-size, if more)")
        self._check_known("tokens", token_ids)

    def _check_known(self, param: str, token_ids: Sequence[int]) -> None:
        n = self._info.vocab_size
        unknown = next((one for one in token_ids if not 0 <= one < n), None)
        if unknown is not None:
            raise InvalidRequest(param, f"token {unknown} is not in the vocabulary of {n}")

    async def render(self, chat: Chat) -> str:
        return await self._in_worker(
            lambda: self._template().render(chat, self._info.n_ctx), n_chars_of(chat)
        )

    def close(self) -> None:
        """What a worker has begun runs on; what waits for the grammars' worker is cancelled."""
        self._workers.shutdown(wait=False)
        self._long_workers.shutdown(wait=False)
        self._text.grammars.close()
        self._text.sight.close()

    @asynccontextmanager
    async def _in_time(self) -> AsyncIterator[None]:
        try:
            async with asyncio.timeout(self._limit_s or None):
                yield
        except TimeoutError:
            raise TimedOut(self._limit_s) from None

    async def _in_worker(self, work: Callable[[], T], n_chars: int = 0) -> T:
        """Run work on a text of so many characters. Long texts wait for each other, short ones for none of them."""
        pool = self._workers if n_chars <= _SHORT_TEXT else self._long_workers
        return await asyncio.get_running_loop().run_in_executor(pool, work)

    # --- on a worker ---

    def _template(self) -> ChatTemplate:
        if self._text.template is None:
            raise InvalidRequest("messages", "this model has no chat template; use /v1/completions")
        return self._text.template

    def _prepare(self, request: Request, admitted_s: float) -> _Made:
        shown = self._shown(request.prompt)
        tokenizer, token_ids = self._text.tokenizer, shown.token_ids
        tail = tokenizer.decode(token_ids[-_N_TAIL:], skip_special=False)
        constraint = None
        if request.grammar is not None:
            constraint = self._text.grammars.constraint(request.grammar, tail, request.tenant, request.owner)
        budget = request.thinking_budget
        cut = None if budget is None else cut_of(budget, tail, tokenizer)
        text = TextStream(
            tokenizer,
            token_ids,
            request.stop,
            skip_special=request.skip_special,
            with_places=request.logprobs is not None,
            includes_stop=request.include_stop,
        )
        prepared = Prepared(
            token_ids,
            text,
            prediction=self._prediction_ids(request),
            text_bias=self._text_bias(request),
            bad_words=bad_word_ids(self._text.tokenizer, request.sampling.bad_words),
            admitted_s=admitted_s,
        )
        return _Made(prepared, shown, tail, constraint, cut)

    def _shown(self, prompt: Prompt) -> Shown:
        """A prompt's tokens and images. Raises `RequestError`."""
        shown, n_ctx = Shown([]), self._info.n_ctx
        if isinstance(prompt, Chat):
            vision = self._text.sight.of(prompt)
            token_ids = self._template().encode(prompt, n_ctx, vision)
            shown = Shown(token_ids) if vision is None else showing.shown(token_ids, prompt.images, vision)
        else:
            shown = Shown(self._prompt_ids(prompt))
        if not shown.token_ids:
            raise InvalidRequest("prompt", "is empty")
        if len(shown.token_ids) >= n_ctx:
            raise ContextTooLong(len(shown.token_ids), n_ctx)
        return shown

    def _prompt_ids(self, prompt: Infill | str | tuple[int | str, ...]) -> list[int]:
        tokenizer, n_ctx = self._text.tokenizer, self._info.n_ctx
        if isinstance(prompt, Infill):
            texts = (prompt.prefix, prompt.suffix, *(text for one in prompt.extra for text in one))
            tokenizer.check_size("prompt", "".join(texts), n_ctx)
            token_ids = tokenizer.infill(prompt.prefix, prompt.suffix, prompt.extra)
        elif isinstance(prompt, str):
            tokenizer.check_size("prompt", prompt, n_ctx)
            token_ids = tokenizer.encode(prompt, add_special=True, parse_special=True)
        else:
            token_ids = self._mixed_ids(prompt)
            self._check_known("prompt", token_ids)
        return token_ids

    def _mixed_ids(self, parts: Sequence[int | str]) -> list[int]:
        """Token ids and texts in a row; what the tokenizer puts before a text comes before the first part alone."""
        tokenizer, n_ctx = self._text.tokenizer, self._info.n_ctx
        if len(parts) >= n_ctx:
            raise ContextTooLong(len(parts), n_ctx)
        texts = [one for one in parts if isinstance(one, str)]
        tokenizer.check_size("prompt", "".join(texts), n_ctx)
        token_ids: list[int] = []
        for i, one in enumerate(parts):
            token_ids += [one] if isinstance(one, int) else tokenizer.encode(one, add_special=i == 0)
        return token_ids

    def _text_bias(self, request: Request) -> Sequence[tuple[int, float]]:
        """`logit_bias` of texts, by their tokens."""
        asked = [one for one in request.sampling.logit_bias if isinstance(one[0], str)]
        texts = [str(text) for text, _ in asked]
        found = self._text.tokenizer.encode_all(texts, add_special=False) if texts else []
        return [(one, amount) for ids, (_, amount) in zip(found, asked, strict=True) for one in ids]

    def _prediction_ids(self, request: Request) -> tuple[int, ...]:
        """The predicted text's tokens. They are never computed, only compared, but a longer reply cannot come."""
        if not request.prediction:
            return ()
        tokenizer, n_ctx = self._text.tokenizer, self._info.n_ctx
        tokenizer.check_size("prediction", request.prediction, n_ctx)
        token_ids = tokenizer.encode(request.prediction, add_special=False, parse_special=False)
        if len(token_ids) > n_ctx:
            raise InvalidRequest(
                "prediction", f"has {len(token_ids)} tokens, the context holds {n_ctx}; --ctx-size sets it"
            )
        return tuple(token_ids)


def bad_word_ids(tokenizer: Tokenizer, words: Sequence[str]) -> list[tuple[int, ...]]:
    """The tokens of each word, at a text's beginning and behind a space.

    As in vLLM the latter count only if they are as many and begin with another token: the space is a part of it.
    """
    bare = [one.lstrip() or one for one in words]
    spaced = [f" {one}" for one in bare]
    made = tokenizer.encode_all([*bare, *spaced], add_special=False) if words else []
    firsts, others = made[: len(bare)], made[len(bare) :]
    pairs = zip(firsts, others, strict=True)
    return [
        tuple(ids)
        for first, other in pairs
        for ids in (first, other)
        if ids and (ids is first or (len(ids) == len(first) and ids[0] != first[0]))
    ]
