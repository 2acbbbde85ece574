"""How a request becomes a slot: what it asks for, resolved against what the server has."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf

from slipstream.engine.api import Request
from slipstream.engine.core.replay import replay
from slipstream.engine.images import NO_IMAGES, PlacedImage
from slipstream.engine.sample.params import resolve_sampling
from slipstream.engine.settings import Settings
from slipstream.engine.slot import Slot, SlotStats
from slipstream.engine.speculate.resolve import resolve_speculate
from slipstream.engine.text.grammar.constraint import Constraint
from slipstream.engine.text.text_stream import TextStream
from slipstream.engine.text.thinking import CutThinking


@dataclass(frozen=True, slots=True)
class Prepared:
    """What a request's texts are to the engine."""

    token_ids: Sequence[int]  # of the prompt
    text: TextStream  # of the reply to come
    prediction: tuple[int, ...] = ()  # tokens of the text that the caller expects
    constraint: Constraint | CutThinking | None = None
    text_bias: Sequence[tuple[int, float]] = ()  # `logit_bias` of texts, by their tokens
    bad_words: Sequence[tuple[int, ...]] = ()  # their tokens
    admitted_s: float = 0.0  # on the engine's clock
    images: Sequence[PlacedImage] = NO_IMAGES  # of the prompt, as the target sees them
    draft_images: Sequence[PlacedImage] = NO_IMAGES  # as a draft model does, if it sees any


@dataclass(frozen=True, slots=True)
class SlotFactory:
    """What the requests of a server are resolved against."""

    settings: Settings
    drafters: Sequence[str]  # those that are loaded
    n_ctx: int  # most tokens of a sequence
    vocab_size: int
    eos_ids: frozenset[int]
    sampling_defaults: Mapping[str, float | int] = field(default_factory=dict)
    suppressed: Sequence[int] = ()  # tokens that are banned unless a request says otherwise

    def resolve(self, request: Request, prepared: Prepared) -> Slot:
        """The request's slot, which has no number yet. Tokens of an earlier run are kept in it.

        Made before the request waits, so that a bad value is refused at once. Raises `RequestError`.
        """
        bias = (
            *((one, -inf) for one in self.suppressed),
            *(one for one in request.sampling.logit_bias if isinstance(one[0], int)),
            *prepared.text_bias,
            *((one[0], -inf) for one in prepared.bad_words if len(one) == 1),
        )
        asked = replace(request.sampling, logit_bias=bias)
        sampling = resolve_sampling(asked, self.sampling_defaults, sorted(self.eos_ids), self.vocab_size)
        sampling = replace(sampling, bad_words=[one for one in prepared.bad_words if len(one) > 1])
        if request.min_tokens:
            end_ids = tuple(sorted(self.eos_ids | frozenset(request.stop_token_ids)))
            sampling = replace(sampling, n_min=request.min_tokens, end_ids=end_ids)
        speculate = resolve_speculate(
            self.settings,
            self.drafters,
            request.speculate,
            predicts=bool(prepared.prediction),
            constrained=prepared.constraint is not None,
        )
        n_prompt, n_limit = len(prepared.token_ids), self.n_ctx
        if request.max_tokens is not None:
            n_limit = min(n_limit, n_prompt + request.max_tokens)
        histogram = [0] * (speculate.n_max + 1)
        slot = Slot(
            -1,
            request,
            list(prepared.token_ids),
            n_prompt,
            n_limit,
            sampling,
            speculate,
            prepared.text,
            stats=SlotStats(admitted_s=prepared.admitted_s, histogram=histogram),
            images=prepared.images,
            draft_images=prepared.draft_images,
            prediction=prepared.prediction,
            constraint=prepared.constraint,
            prompt_logprobs=None if request.prompt_logprobs is None else [],
            echoes=request.echo or request.prompt_logprobs is not None,
        )
        if request.emitted:
            replay(slot, self.eos_ids)
        return slot
