"""From a request to `/v1/responses` to the job of a chat: the items before it, what references stand for, and what is
left out where the context is too small.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from pydantic import TypeAdapter

from slipstream.engine.api import AsyncEngine
from slipstream.engine.errors import ContextTooLong, TextTooLong
from slipstream.server.http.error_table import bad_field, bad_request, not_found
from slipstream.server.openai.convert import Caller, chat_fields, chat_job
from slipstream.server.openai.job import Form, Job
from slipstream.server.openai.progress import FIELDS
from slipstream.server.openai.wire import MAX_MESSAGES, ChatRequest
from slipstream.server.responses.input_items import AnyItem, ItemReference, Items, MessageItem, messages_of
from slipstream.server.responses.kept import MOST_CHAINED, KeptResponses
from slipstream.server.responses.response import PREFIX
from slipstream.server.responses.wire import LOGPROBS, ResponsesRequest

N_KEY = 32  # hexadecimal digits of a response's id, with which the ids of its items begin too
READ = TypeAdapter(Items)
Read = Callable[[Sequence[AnyItem]], Job]


async def resolved(wire: ResponsesRequest, kept: KeptResponses, tenant: str) -> list[AnyItem]:
    """The items of the request's own input, references replaced by what they stand for. Raises `Refused`."""
    references = [one.id for one in wire.input if isinstance(one, ItemReference)]
    known: dict[str, Any] = {}
    for response_id in {PREFIX + one.partition("_")[2][:N_KEY] for one in references}:
        response = await kept.get(tenant, response_id)
        if response is not None:
            known |= {item["id"]: item for item in (*response.input, *response.body["output"])}
    items: list[AnyItem] = []
    for index, one in enumerate(wire.input):
        if not isinstance(one, ItemReference):
            items.append(one)
        elif one.id in known:
            items += READ.validate_python([known[one.id]])
        else:
            param = f"input[{index}].id"
            raise not_found(f"{param}: no item of this id is kept", code="item_not_found", param=param)
    return items


async def before(wire: ResponsesRequest, kept: KeptResponses, tenant: str) -> list[AnyItem]:
    """The items of the responses that the request goes on from, the oldest first. Raises `Refused`."""
    if wire.previous_response_id is None:
        return []
    try:
        chain = await kept.chain(tenant, wire.previous_response_id)
    except LookupError as error:
        which = "it" if error.args[0] == wire.previous_response_id else "one before it"
        message = f"previous_response_id: {which} is not kept, or not any more (see --responses-kept)"
        raise not_found(message, code="previous_response_not_found", param="previous_response_id") from None
    except OverflowError:
        message = f"previous_response_id: the conversation before is longer than {MOST_CHAINED >> 20} MiB"
        raise bad_request(message, param="previous_response_id") from None
    raw = [item for one in chain for item in (*one.input, *one.body["output"])]
    if len(raw) + len(wire.input) > MAX_MESSAGES:
        message = f"previous_response_id: the conversation has more than {MAX_MESSAGES} items"
        raise bad_request(message, param="previous_response_id")
    return READ.validate_python(raw)


def response_job(wire: ResponsesRequest, items: Sequence[AnyItem], caller: Caller, form: Form) -> Job:
    """The job of a conversation that consists of `items`. Raises `Refused`."""
    source = wire.text and wire.text.format and wire.text.format.source
    if source and wire.response_format:
        raise bad_field("text.format", "cannot be combined with response_format")
    fields: dict[str, Any] = {
        **chat_fields(wire, FIELDS),
        "messages": messages_of(items, wire.instructions),
        "max_completion_tokens": wire.max_output_tokens,
        "logprobs": bool(wire.top_logprobs) or LOGPROBS in (wire.include or ()) or None,
        "top_logprobs": wire.top_logprobs,
        "reasoning_effort": wire.reasoning and wire.reasoning.effort,
        "response_format": source or wire.response_format,
        "tools": wire.tools and wire.tools.functions,
    }
    shared = ("tool_choice", "parallel_tool_calls", "chat_template_kwargs")
    fields |= {name: getattr(wire, name) for name in shared}
    return chat_job(ChatRequest.model_construct(**fields), caller, form)


async def fitting(engine: AsyncEngine, items: Sequence[AnyItem], n_reply: int, read: Read) -> Job:
    """The job of as many of the latest turns as fit, with room for a reply. Raises what `read` raises.

    System messages at the beginning stay. If the last turn alone does not fit, its job is returned all the same: the
    engine refuses it.
    """
    n_head = next((i for i, one in enumerate(items) if not _is_system(one)), len(items))
    turns = [i for i in range(n_head, len(items)) if _is_user(items[i])]
    starts = [n_head, *(i for i in turns if i > n_head)]
    room = engine.info.n_ctx - max(1, min(n_reply, engine.info.n_ctx // 2))
    low, high = 0, len(starts) - 1
    while low < high:
        middle = (low + high) // 2
        job = read([*items[:n_head], *items[starts[middle] :]])
        low, high = (low, middle) if await _fits(engine, job, room) else (middle + 1, high)
    return read([*items[:n_head], *items[starts[low] :]])


async def _fits(engine: AsyncEngine, job: Job, room: int) -> bool:
    try:
        return len(await engine.prompt_ids(job.requests[0].prompt)) <= room
    except (ContextTooLong, TextTooLong):
        return False


def _is_system(item: AnyItem) -> bool:
    return isinstance(item, MessageItem) and item.role in ("system", "developer")


def _is_user(item: AnyItem) -> bool:
    return isinstance(item, MessageItem) and item.role == "user"
