"""The command line's server loop over a fake engine, for tests of signals and exit statuses.

`SLOW_LOAD` in the model's name delays loading, `BROKEN` makes it fail; streams take about a second,
or no time with `FAST`. The engine of `THINKING` thinks before it calls its first tool, or answers with what it thought.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from dataclasses import replace

from slipstream.engine.api import AsyncEngine, Chat, Delta, Request
from slipstream.engine.errors import UnsupportedModel
from slipstream.engine.settings import Settings
from slipstream.server.command import standard_streams
from slipstream.server.responses import kept
from tests.commanded import start
from tests.http.fake import INFO, FakeEngine, Step, done, words

TEMPLATE = '{{ messages }}{{ tools }}<think></think><tool_call>{"name": "", "arguments": {}}</tool_call>'
THOUGHT = "<think>\nI need it.\n</think>\n\n"


def thinks(request: Request) -> Iterator[Step]:
    """Thinking, then a call of `look`; or what the conversation says that was thought, if a tool has answered."""
    chat = request.prompt
    assert isinstance(chat, Chat)
    earlier = [str(one.get("reasoning_content") or "").strip() for one in chat.messages]
    text = THOUGHT + "You said: " + " ".join(one for one in earlier if one)
    tools = [one["function"]["name"] for one in chat.template_kwargs.get("tools", ())]
    if chat.messages[-1]["role"] == "user" and any(name.endswith("look") for name in tools):
        name = next(name for name in tools if name.endswith("look"))
        call = f'{{"name": "{name}", "arguments": {{"name": "it", "count": 1}}}}'
        text = f"{THOUGHT}<tool_call>\n{call}\n</tool_call>"
    tokens = [text[i : i + 3] for i in range(0, len(text), 3)]
    for one in tokens:
        yield Delta(one, (1,), (None,), (one,))
    yield done(request, len(tokens))


def load(settings: Settings) -> AsyncEngine:
    if "SLOW_LOAD" in settings.model:
        time.sleep(20)
    if "BROKEN" in settings.model:
        raise UnsupportedModel(f"{settings.model}: no such architecture")
    if "CRASH" in settings.model:
        raise ZeroDivisionError("a fault of ours")
    delay_s = 0.0 if "FAST" in settings.model else 0.25
    engine = FakeEngine(script=lambda request: words(request, delay_s=delay_s))
    if "THINKING" in settings.model:
        engine = FakeEngine(script=thinks)
        engine.info = replace(INFO, chat_template=TEMPLATE, n_ctx=1 << 17)  # agents have long prompts
    if "DYING" in settings.model:
        engine.status = "failed"
    return engine


if __name__ == "__main__":
    standard_streams.hold()
    kept.LOCKED_MS = 60_000  # a test lets go of its lock, however slow the machine
    start(sys.argv[1:], load)
