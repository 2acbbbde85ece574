"""What is known of a request before its texts are tokenised: their size, and whether its numbers are in bounds."""

from __future__ import annotations

from slipstream.engine.api import MOST_LOGPROBS, Chat, Infill, ModelInfo, Prompt, Request
from slipstream.engine.errors import InvalidRequest
from slipstream.engine.text.control import strings


def n_chars_of(prompt: Prompt) -> int:
    """Characters of a prompt's texts; token ids have none."""
    if isinstance(prompt, Chat):
        return sum(map(len, strings(prompt.messages)))
    if isinstance(prompt, Infill):
        return len(prompt.prefix) + len(prompt.suffix)
    return len(prompt) if isinstance(prompt, str) else 0


def check_request(request: Request, info: ModelInfo) -> None:
    """Raises `InvalidRequest` for numbers of a request that are out of bounds."""
    if request.max_tokens is not None and request.max_tokens < 1:
        raise InvalidRequest("max_tokens", f"{request.max_tokens} is less than 1")
    if not 0 <= request.min_tokens <= info.n_ctx:
        raise InvalidRequest(
            "min_tokens", f"{request.min_tokens} is not between 0 and the context of {info.n_ctx}"
        )
    if request.max_tokens is not None and request.min_tokens > request.max_tokens:
        raise InvalidRequest(
            "min_tokens", f"{request.min_tokens} is more than max_tokens {request.max_tokens}"
        )
    if request.logprobs is not None and not 0 <= request.logprobs <= MOST_LOGPROBS:
        raise InvalidRequest("top_logprobs", f"{request.logprobs} is not between 0 and {MOST_LOGPROBS}")
    for token_id in request.stop_token_ids:
        if not 0 <= token_id < info.vocab_size:
            raise InvalidRequest(
                "stop_token_ids", f"token {token_id} is not in the vocabulary of {info.vocab_size}"
            )
