"""What a chat template writes of a few short conversations: by that the server knows what the template can show.

The conversations hold needles, texts that no template has of its own. Rendering is the engine's work, in a worker
thread, with a limit on the time of all together; what is refused or late counts as not rendered.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from slipstream.engine.api import AsyncEngine, Chat
from slipstream.engine.errors import EngineError

RENDER_S = 10.0  # seconds for all conversations

SYSTEM, QUESTION = "needleOfSystem", "needleOfQuestion"
FIRST, SECOND = "needleFirstTool", "needleSecondTool"


def tool(name: str) -> dict[str, Any]:
    return {
        "type": "function",
        "function": {
            "name": name,
            "description": "needleOfDescription",
            "parameters": {"type": "object", "properties": {}, "required": []},
        },
    }


TOOLS = {"tools": [tool(FIRST), tool(SECOND)]}
ASKED = {"role": "user", "content": QUESTION}
CHATS: Mapping[str, Chat] = {
    "system": Chat([{"role": "system", "content": SYSTEM}, ASKED]),
    "tools": Chat([ASKED], TOOLS),
}


@dataclass(frozen=True, slots=True)
class Renderings:
    """Texts by the name of their conversation in `CHATS`; one is missing where the template refuses it."""

    texts: Mapping[str, str] = field(default_factory=dict)

    @property
    def has_system(self) -> bool:
        """Whether system messages are shown."""
        return SYSTEM in self.texts.get("system", "")

    @property
    def has_tools(self) -> bool | None:
        """Whether tools are shown; None if a conversation with tools is refused."""
        return FIRST in self.texts["tools"] if "tools" in self.texts else None


async def renderings(engine: AsyncEngine) -> Renderings:
    """What the template of the engine's model makes of the conversations."""
    texts: dict[str, str] = {}
    try:
        async with asyncio.timeout(RENDER_S):
            for name, chat in CHATS.items():
                try:
                    texts[name] = await engine.render(chat)
                except EngineError:
                    continue
    except TimeoutError:
        pass
    return Renderings(texts)
