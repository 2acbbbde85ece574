"""Tools for chat templates that have no place for them, or whose calls cannot be read: a system message describes them.

Calls are JSON between tags, the form of Hermes: of all forms it is the one that most models have seen, and a plain
answer cannot be taken for it. Where the model may answer or call (`tool_choice: auto`) no grammar is set: one that
holds for every reply would have to wrap plain answers in JSON as well, so that they are not those that the model gives
without tools. Where a call is asked for, or JSON of a schema beside calls, the grammar is that of Hermes.

Earlier calls and results become text of the same form, as a template without tools has no place for those either.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from slipstream.server.openai.formats.format import Format
from slipstream.server.openai.formats.hermes import CLOSE, HERMES, OPEN

Message = dict[str, Any]

GENERIC = Format(
    name="generic", reasoning=HERMES.reasoning, calls=HERMES.calls, enforced=HERMES.enforced, instructs=True
)
RESULT, RESULT_END = "<tool_response>", "</tool_response>"
SPOKEN = ("system", "developer")


def instructed(
    messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], *, many: bool, has_system: bool
) -> list[Message]:
    """The conversation as a template without tools can show it, with instructions for these tools.

    `many`: the reply may have several calls; `has_system`: the template shows system messages. If it does not, what
    they say goes into the first user turn, as the instructions do.
    """
    told = _joined([_as_text(one) for one in messages])
    if not tools:
        return told
    heads = [one for one in told[:1] if one["role"] in SPOKEN]
    turns = told[len(heads) :]
    text = "\n\n".join([*(str(one["content"] or "") for one in heads), instructions(tools, many=many)])
    if has_system:
        return [{**(heads[0] if heads else {"role": "system"}), "content": text}, *turns]
    if turns and turns[0]["role"] == "user":
        return [{**turns[0], "content": _followed(f"{text}\n\n", turns[0]["content"])}, *turns[1:]]
    return [{"role": "user", "content": text}, *turns]


def instructions(tools: Sequence[Mapping[str, Any]], *, many: bool) -> str:
    """What the model is to know of its tools, and of how to call them."""
    listed = "\n".join(json.dumps(one["function"], ensure_ascii=False) for one in tools)
    count = "Repeat this for further calls." if many else "Make one call at most."
    return (
        f"You can call these functions, each described by a line of JSON:\n\n{listed}\n\n"
        "To call a function, write its name and its arguments as JSON between these tags:\n"
        f'{OPEN}\n{{"name": "the function", "arguments": {{…}}}}\n{CLOSE}\n'
        f"{count} Write nothing after a call: its result comes in the next message, between {RESULT} and {RESULT_END}. "
        "Where no function helps, just answer, without tags."
    )


def call_text(call: Mapping[str, Any]) -> str:
    """An earlier call in the form that the model is asked to write."""
    function = call["function"]
    head = f'{{"name": {json.dumps(function["name"])}, "arguments": '
    return f"{OPEN}\n{head}{function['arguments'] or '{}'}}}\n{CLOSE}"


def _as_text(message: Message) -> Message:
    """A message without what only templates for tools can show."""
    if message["role"] == "tool":
        opened = _followed(f"{RESULT}\n", message["content"] or "")
        return {"role": "user", "content": _followed(opened, f"\n{RESULT_END}")}
    calls = message.get("tool_calls")
    if not calls:
        return message
    rest = {name: value for name, value in message.items() if name != "tool_calls"}
    said = [str(message["content"])] if message["content"] else []
    return {**rest, "content": "\n".join([*said, *map(call_text, calls)])}


def _joined(messages: Sequence[Message]) -> list[Message]:
    """The messages with results joined to the user's turns around them: many templates want turns to alternate."""
    told: list[Message] = []
    for one in messages:
        if told and one["role"] == told[-1]["role"] == "user" and (_is_result(one) or _is_result(told[-1])):
            told[-1] = {
                **told[-1],
                "content": _followed(_followed(told[-1]["content"], "\n"), one["content"]),
            }
        else:
            told.append(one)
    return told


def _is_result(message: Message) -> bool:
    content = message["content"]
    last = content[-1].get("text", "") if isinstance(content, list) else str(content)
    return bool(last.endswith(RESULT_END))


def _followed(first: Any, second: Any) -> Any:
    """Two contents as one: texts joined, or lists of texts and images."""
    if isinstance(first, str) and isinstance(second, str):
        return first + second
    parts = ([{"type": "text", "text": one}] if isinstance(one, str) else one for one in (first, second))
    return [part for some in parts for part in some]
