"""What is known of a request before its texts are tokenised: whether there is a place for it, its texts' size, and
whether its numbers are in bounds.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping

from slipstream.engine.api import MOST_LOGPROBS, Chat, Infill, ModelInfo, Prompt, Request
from slipstream.engine.errors import InvalidRequest, Overloaded
from slipstream.engine.text.control import strings

_RETRY_AFTER_S = 1.0
_WHERE = "--max-queue sets how many there are besides the slots"


def n_chars_of(prompt: Prompt) -> int:
    """Characters of a prompt's texts; token ids have none."""
    if isinstance(prompt, Chat):
        return sum(map(len, strings(prompt.messages)))
    if isinstance(prompt, Infill):
        return (
            len(prompt.prefix) + len(prompt.suffix) + sum(len(text) for one in prompt.extra for text in one)
        )
    if isinstance(prompt, str):
        return len(prompt)
    return sum(len(one) for one in prompt if isinstance(one, str))


def check_request(request: Request, info: ModelInfo) -> None:
    """Raises `InvalidRequest` for numbers of a request that are out of bounds."""
    if request.max_tokens is not None and request.max_tokens < 0:
        raise InvalidRequest("max_tokens", f"{request.max_tokens} is less than 0")
    if not 0 <= request.min_tokens <= info.n_ctx:
        raise InvalidRequest(
            "min_tokens", f"{request.min_tokens} is not between 0 and the context of {info.n_ctx}"
        )
    if request.max_tokens is not None and request.min_tokens > request.max_tokens:
        raise InvalidRequest(
            "min_tokens", f"{request.min_tokens} is more than max_tokens {request.max_tokens}"
        )
    if request.slot is not None and not 0 <= request.slot < info.n_slots:
        raise InvalidRequest(
            "id_slot", f"{request.slot} is not between 0 and {info.n_slots - 1} (--parallel)"
        )
    for name, n_top in (("top_logprobs", request.logprobs), ("prompt_logprobs", request.prompt_logprobs)):
        if n_top is not None and not 0 <= n_top <= MOST_LOGPROBS:
            raise InvalidRequest(name, f"{n_top} is not between 0 and {MOST_LOGPROBS}")
    _check_tokens(request, info.vocab_size)


def _check_tokens(request: Request, vocab_size: int) -> None:
    if request.emitted and request.sampling.seed is None:
        raise InvalidRequest("seed", "is needed to go on with a reply (emitted)")
    for name, token_ids in (("stop_token_ids", request.stop_token_ids), ("emitted", request.emitted)):
        for token_id in token_ids:
            if not 0 <= token_id < vocab_size:
                raise InvalidRequest(name, f"token {token_id} is not in the vocabulary of {vocab_size}")


class Places:
    """Places for requests that run or wait, and how many of them an owner may have.

    Half of the places are kept for the owners in equal parts, so that one who asks finds a place however many another
    has asked for; the other half is for those who come first. While there has been one owner, all are its own.
    """

    def __init__(self, n_places: int) -> None:
        """Places there are: slots and queue together, at least one."""
        self.n_places = n_places
        # Those that asked last, as many as places can be kept for.
        self._known: OrderedDict[str, None] = OrderedDict()

    def check(self, owner: str, taken: Mapping[str, int]) -> None:
        """One more request of an owner, beside those that each has. Raises `Overloaded` if there is no place for it."""
        self._known[owner] = None
        self._known.move_to_end(owner)
        while len(self._known) > max(1, self.n_places // 2):
            self._known.popitem(last=False)
        n_own, n_taken = taken.get(owner, 0), sum(taken.values())
        n_kept = max(1, self.n_places // (2 * len(self._known)))  # for each of them
        n_others = sum(max(n_kept - taken.get(one, 0), 0) for one in self._known if one != owner)
        if n_taken >= self.n_places:
            raise Overloaded(f"all {self.n_places} places are taken; {_WHERE}", _RETRY_AFTER_S)
        if n_own >= n_kept and n_taken + n_others >= self.n_places:
            reason = f"this key has {n_own} requests already, and the other places are kept for other keys; {_WHERE}"
            raise Overloaded(reason, _RETRY_AFTER_S)
