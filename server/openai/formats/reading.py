"""What a chat request needs of its model's format: the parser of a reply, the control tokens that the parser must see,
the grammar of forced calls.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from slipstream.engine.api import AsyncEngine, ModelInfo
from slipstream.engine.settings import Settings
from slipstream.server.http.error_table import unsupported
from slipstream.server.openai.formats import scanner
from slipstream.server.openai.formats.enforce import quoted
from slipstream.server.openai.formats.format import Format, Tool, Tools
from slipstream.server.openai.formats.harmony import HarmonyParser
from slipstream.server.openai.formats.known import NONE, can_call, format_of, has_tools
from slipstream.server.openai.formats.parser import Parser
from slipstream.server.openai.formats.renderings import Renderings, renderings
from slipstream.server.openai.formats.reply_parser import ReplyParser

TAG = re.compile(r"<[^<>\s]+>")


def parser_of(
    format_: Format,
    tools: Tools,
    prompt_tail: str,
    *,
    most_calls: int | None = None,
    thinks_aloud: bool = False,
    is_forced: bool = False,
) -> ReplyParser:
    """A fresh parser for a reply. Call `scanner.load` first, off the event loop.

    `most_calls`: the reply ends after so many; `thinks_aloud`: thinking is content; `is_forced`: a grammar holds behind
    thinking.
    """
    if format_.channels:
        return HarmonyParser(tools, prompt_tail, most_calls=most_calls, thinks_aloud=thinks_aloud)
    return Parser(
        format_, tools, prompt_tail, most_calls=most_calls, thinks_aloud=thinks_aloud, is_forced=is_forced
    )


@dataclass(frozen=True, slots=True)
class Known:
    """A model's format, with the tokens of its tokenizer that matter for it."""

    format: Format
    controls: frozenset[str] = frozenset()  # control tokens of the model, by their text
    tokens: frozenset[str] = frozenset()  # all tokens added to the vocabulary, by their text
    ids: Mapping[str, int] = field(default_factory=dict)  # of the format's markers that are tokens
    has_tools: bool = True  # the template has a place for tools
    has_system: bool = True  # and for system messages
    by_id: bool = False  # it shows a call's function by the call's id alone

    @property
    def needs_controls(self) -> bool:
        """Whether the format's markers are control tokens, which replies leave out unless asked."""
        return bool(self.format.markers & self.controls)

    @property
    def can_call(self) -> bool:
        """Whether calls in this format can be read."""
        return can_call(self.format)

    @property
    def silent(self) -> frozenset[str]:
        """Control tokens that the format does not use: they are left out even where its markers must be visible."""
        return self.controls - self.format.markers

    def mark(self, text: str) -> str:
        """The Lark text of a marker: a token if the model has it as a token, else a quoted string."""
        if text in self.tokens and TAG.fullmatch(text):
            return text
        return f"<[{self.ids[text]}]>" if text in self.controls else quoted(text)

    def forced(self, tools: Sequence[Tool], *, many: bool) -> str:
        """The Lark grammar of a reply that calls one of the tools. Raises `Refused`."""
        if self.format.enforced is None:
            raise unsupported(
                "tool_choice", f"calls cannot be forced in this model's format ({self.format.name})"
            )
        return self.format.enforced(tools, self.mark, many=many)


class Knowing:
    """Keeps what is `known` of the model in use, so that it is found out only once."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._info: ModelInfo | None = None
        self._known = Known(NONE)

    async def of(self, engine: AsyncEngine) -> Known:
        info = engine.info
        if info is not self._info:
            if self._info is None or not _is_same_model(info, self._info):
                self._known = await known(engine, self._settings)
            self._info = info
        return self._known


def _is_same_model(one: ModelInfo, other: ModelInfo) -> bool:
    """A cluster has slots and pages that come and go."""
    return replace(one, n_slots=other.n_slots, n_pages=other.n_pages) == other


async def known(engine: AsyncEngine, settings: Settings) -> Known:
    """What is known of the engine's model; imports what its parser needs, which takes a second."""
    info: ModelInfo = engine.info
    seen = await renderings(engine) if info.chat_template else Renderings()
    await asyncio.to_thread(scanner.load)
    format_ = await asyncio.to_thread(format_of, info, settings.chat_format, seen)
    marks = sorted(format_.markers & info.added_tokens.keys())
    ids = {one: await engine.tokenize(one, add_special=False, parse_special=True) for one in marks}
    return Known(
        format_,
        controls=frozenset(text for text, is_control in info.added_tokens.items() if is_control),
        tokens=frozenset(info.added_tokens),
        ids={text: found[0] for text, found in ids.items()},
        has_tools=has_tools(info, seen),
        has_system=seen.has_system,
        by_id=seen.by_id,
    )
