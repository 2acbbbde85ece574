"""What a request asks of thinking: where it is put, and how long it may be."""

from __future__ import annotations

from slipstream.engine.constraints import ThinkingBudget
from slipstream.engine.settings import Settings
from slipstream.server.openai.formats.reading import Known
from slipstream.server.openai.message import FIELDS
from slipstream.server.openai.readers import NO_LIMIT
from slipstream.server.openai.wire import ChatRequest, Generate


def reasoning_fields(wire: ChatRequest, settings: Settings) -> tuple[str, ...] | None:
    """The fields that thinking is put into: none if it is left out. None: it is content, with its markers."""
    if wire.include_reasoning is False:
        return ()
    if wire.separate_reasoning is False or wire.reasoning_format == "none":
        return None
    if wire.separate_reasoning or wire.reasoning_format == "deepseek":
        return FIELDS[settings.reasoning_field] or FIELDS["reasoning_content"]
    return FIELDS[settings.reasoning_field] or None


def thinking_budget(wire: Generate, known: Known, settings: Settings) -> ThinkingBudget | None:
    """How long thinking may be; None if it is not limited, or if the model's format has none.

    The server's own limit is for conversations: what continues a text may begin with anything.
    """
    n_tokens = settings.reasoning_budget if isinstance(wire, ChatRequest) else NO_LIMIT
    for asked in (wire.thinking_budget_tokens, wire.reasoning_budget_tokens, wire.thinking_token_budget):
        n_tokens = n_tokens if asked is None else asked
    markers, message = known.format.thoughts, wire.reasoning_budget_message
    if n_tokens == NO_LIMIT or markers is None:
        return None
    return ThinkingBudget(
        n_tokens, markers, settings.reasoning_budget_message if message is None else message
    )
