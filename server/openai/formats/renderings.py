"""What a chat template writes of a few short conversations: by that the server knows what the template can show, and
`derived.py` how it writes calls and thinking.

The conversations hold needles, texts that no template has of its own. Rendering is the engine's work, in a worker
thread, with a limit on the time of all together; what is refused or late counts as not rendered.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from slipstream.engine.api import AsyncEngine, Chat
from slipstream.engine.errors import EngineError
from slipstream.server.openai.formats.call_ids import with_naming_ids

RENDER_S = 10.0  # seconds for all conversations

SYSTEM, QUESTION, CONTENT, THOUGHT = "needleSystem", "needleQuestion", "needleContent", "needleThought"
FIRST, SECOND = "needleFirstTool", "needleSecondTool"
IDS = ("needleId1", "needleId2")  # nine letters and digits, as Mistral's templates want them
WORD, NUMBER, FLAG, RECORD, LIST = "needleWord", "needleNumber", "needleFlag", "needleRecord", "needleList"
# An argument of each type whose values a template may write in a way of their own, by its name.
ARGUMENTS: Mapping[str, Any] = {
    WORD: "needleText",
    NUMBER: 4711,
    FLAG: True,
    RECORD: {"needleInner": 1},
    LIST: ["needleItem"],
}
# Arguments with which a format has to prove that it reads what the template writes.
PROOF: Mapping[str, Any] = {
    WORD: 'it\'s "é"\n\\ {x} a < b',
    NUMBER: -5,
    RECORD: {"needleInner": [1.5, "e}", None, {"f": False}]},
}
TYPES = {WORD: "string", NUMBER: "integer", FLAG: "boolean", RECORD: "object", LIST: "array"}
PARAMETERS = {
    "type": "object",
    "properties": {name: {"type": kind, "description": f"a {kind}"} for name, kind in TYPES.items()},
    "required": [WORD],
}


def _tool(name: str) -> dict[str, Any]:
    function = {"name": name, "description": "does something", "parameters": PARAMETERS}
    return {"type": "function", "function": function}


def _call(name: str, call_id: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "id": call_id,
        "type": "function",
        "function": {"name": name, "arguments": json.dumps(arguments, ensure_ascii=False)},
    }


def _chat(*turns: Mapping[str, Any]) -> Chat:
    """A conversation with tools that ends as it is. The keywords switch thinking on where a template has a switch."""
    keywords = {"tools": [_tool(FIRST), _tool(SECOND)], "enable_thinking": True, "thinking": True}
    asked = {"role": "user", "content": QUESTION}
    return Chat([asked, *turns], keywords, add_generation_prompt=False)


def _turn(content: str, *calls: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **({"tool_calls": list(calls)} if calls else {}), **more}


_FIRST, _SECOND = (
    _call(name, call_id, ARGUMENTS) for name, call_id in zip((FIRST, SECOND), IDS, strict=True)
)
_PROVED = (_call(FIRST, IDS[0], PROOF), _call(SECOND, IDS[1], {}))
CHATS: Mapping[str, Chat] = {
    "system": Chat([{"role": "system", "content": SYSTEM}, {"role": "user", "content": QUESTION}]),
    "tools": _chat(),
    "begun": replace(_chat(), add_generation_prompt=True),
    "said": _chat(_turn(CONTENT)),
    "thought": _chat(_turn(CONTENT, reasoning_content=THOUGHT)),
    "planned": _chat(_turn("", _FIRST, reasoning_content=THOUGHT)),
    "called": _chat(_turn("", _FIRST)),
    "called twice": _chat(_turn("", _FIRST, _SECOND)),
    "proof of one": _chat(_turn("", _PROVED[0])),
    "proof": _chat(_turn("", *_PROVED)),
}


@dataclass(frozen=True, slots=True)
class Renderings:
    """Texts by the name of their conversation in `CHATS`; one is missing where the template refuses it.

    by_id: a call's function is shown by the call's id alone; ids in `texts` are those of `with_naming_ids`.
    """

    texts: Mapping[str, str] = field(default_factory=dict)
    by_id: bool = False

    @property
    def has_system(self) -> bool:
        """Whether system messages are shown."""
        return SYSTEM in self.texts.get("system", "")

    @property
    def has_tools(self) -> bool | None:
        """Whether tools are shown; None if a conversation with tools is refused."""
        return FIRST in self.texts["tools"] if "tools" in self.texts else None

    @property
    def is_lone(self) -> bool:
        """Whether a turn with one call is taken and one with two is refused."""
        # "proof of one" comes later than "called twice", which then was refused and not late.
        return "called" in self.texts and "proof of one" in self.texts and "called twice" not in self.texts


async def renderings(engine: AsyncEngine) -> Renderings:
    """What the template of the engine's model makes of the conversations."""
    texts: dict[str, str] = {}
    by_id = False
    try:
        async with asyncio.timeout(RENDER_S):
            await _render(engine, CHATS, texts)
            called = texts.get("called", "")[len(texts.get("tools", "")) :]
            by_id = IDS[0] in called and FIRST not in called
            if by_id:
                named = {
                    name: replace(chat, messages=with_naming_ids(chat.messages))
                    for name, chat in CHATS.items()
                }
                await _render(engine, named, texts)
    except TimeoutError:
        pass
    return Renderings(texts, by_id)


async def _render(engine: AsyncEngine, chats: Mapping[str, Chat], texts: dict[str, str]) -> None:
    for name, chat in chats.items():
        try:
            texts[name] = await engine.render(chat)
        except EngineError:
            continue
