"""A reply that an earlier run of its request has begun: its tokens are kept again, without events.

All that a reply is (text held back, penalties, the grammar's state) follows from its tokens, so nothing else has to be
carried from one engine to another. Their keys and values are filled by prefill, as those of a preempted slot are.
"""

from __future__ import annotations

from collections.abc import Set

from slipstream.engine.core.finish import keep
from slipstream.engine.errors import InvalidRequest
from slipstream.engine.slot import Slot
from slipstream.engine.speculate.drafter import NO_DRAFT
from slipstream.engine.speculate.verify import Verdict


def replay(slot: Slot, eos_ids: Set[int]) -> None:
    """Bring a new slot to where its request's `emitted` tokens end.

    A log-probability is sent with the text in which its token begins. Those that waited when the earlier run broke off
    are lost, so their tokens are left out here: the same seed picks them again, and `unsent` drops what was sent.

    Raises `InvalidRequest` for tokens that cannot be the beginning of this reply.
    """
    n_sent = 0  # tokens behind which nothing waited
    for token_id in slot.request.emitted:
        if slot.ended is not None:
            break
        _, slot.ended = keep(slot, NO_DRAFT, Verdict((token_id,), 0), eos_ids, 0.0)
        if slot.ended is None and slot.constraint is not None and slot.constraint.n_tokens < slot.n_decoded:
            raise InvalidRequest("emitted", f"the grammar has no place for token {slot.n_decoded - 1}")
        n_sent = slot.n_decoded if slot.text.has_all_begun else n_sent
    if slot.n_decoded < slot.n_emitted:
        raise InvalidRequest(
            "emitted", f"the reply is over after {slot.n_decoded} of {slot.n_emitted} tokens"
        )
    if slot.ended is None and n_sent < slot.n_decoded:
        slot.truncate(slot.n_prompt + n_sent)
    slot.echoes, slot.prompt_logprobs, slot.n_reported = False, None, slot.n_prompt
