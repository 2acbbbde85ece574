"""From a request to `/v1/messages` to the job of a chat."""

from __future__ import annotations

from functools import partial
from typing import Any

from slipstream.server.anthropic.content_blocks import chat_messages
from slipstream.server.anthropic.message_reply import MessageReply
from slipstream.server.anthropic.wire import CountRequest
from slipstream.server.http.error_table import bad_field, unsupported
from slipstream.server.openai.convert import Caller, chat_fields, chat_job
from slipstream.server.openai.job import Form, Job
from slipstream.server.openai.wire import ChatRequest, Message

ENABLED = {"enabled": True, "adaptive": True, "disabled": False}  # by the type of `thinking`


def messages_job(wire: CountRequest, caller: Caller) -> Job:
    """The job of a conversation. Raises `Refused`."""
    if wire.n_probs:
        raise unsupported("n_probs", "a message has no place for log-probabilities")
    messages = chat_messages(wire.system, wire.messages)
    thinking, config, choice = wire.thinking, wire.output_config, wire.tool_choice
    kwargs = wire.chat_template_kwargs or {}
    if thinking is not None and thinking.type in ENABLED:
        kwargs = {"enable_thinking": ENABLED[thinking.type], **kwargs}
    fields: dict[str, Any] = {
        **chat_fields(wire),
        "messages": messages,
        "stop": wire.stop_sequences if wire.stop_sequences is not None else wire.stop,
        "tools": wire.tools,
        "tool_choice": choice and choice.choice,
        "parallel_tool_calls": choice.many if choice else None,
        "chat_template_kwargs": kwargs,
        "continue_final_message": _is_begun(wire, messages[-1]),
    }
    if thinking is not None and thinking.budget_tokens is not None:
        fields["thinking_token_budget"] = thinking.budget_tokens
    if config is not None:
        fields["reasoning_effort"] = config.effort
        fields["response_format"] = config.format or wire.response_format
    hides_thinking = thinking is not None and thinking.display == "omitted"
    form = Form("msg_", "messages", partial(MessageReply, hides_thinking=hides_thinking))
    return chat_job(ChatRequest.model_construct(**fields), caller, form)


def _is_begun(wire: CountRequest, last: Message) -> bool:
    """Whether the last message is a reply that is to be continued. Raises `Refused` for one that ends in calls."""
    if last.role != "assistant":
        return False
    if last.tool_calls:
        param = f"messages[{len(wire.messages) - 1}]"
        raise bad_field(param, "results of its calls must follow (tool_result blocks)")
    return bool(last.content)
