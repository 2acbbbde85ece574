"""The list of formats, and the choice of a model's format: by its chat template, unless `--chat-format` names it.

A template of no family here is read by `derived.py`. One that has no place for tools, or whose calls cannot be read,
makes the format `generic`.
"""

from __future__ import annotations

from dataclasses import replace

from slipstream.engine.api import ModelInfo
from slipstream.server.openai.formats.deepseek import DEEPSEEK, DEEPSEEK_V31
from slipstream.server.openai.formats.derived import NAME as DERIVED
from slipstream.server.openai.formats.derived import derived, thinking
from slipstream.server.openai.formats.format import Format
from slipstream.server.openai.formats.gemma4 import GEMMA4
from slipstream.server.openai.formats.generic import GENERIC
from slipstream.server.openai.formats.glm import GLM
from slipstream.server.openai.formats.harmony import HARMONY
from slipstream.server.openai.formats.hermes import HERMES
from slipstream.server.openai.formats.llama3 import LLAMA3
from slipstream.server.openai.formats.mistral import MISTRAL, MISTRAL_LIST
from slipstream.server.openai.formats.qwen3_coder import QWEN3_CODER
from slipstream.server.openai.formats.renderings import Renderings

# Of models whose calls cannot be read: those that think between tags, and the rest.
PLAIN = Format(name="plain", signs=("</think>",), reasoning=("<think>", "</think>"))
NONE = Format(name="none")
# In this order: the first format that a chat template fits is chosen. NONE fits every template.
FORMATS: tuple[Format, ...] = (
    HARMONY,
    DEEPSEEK,
    DEEPSEEK_V31,
    MISTRAL,
    MISTRAL_LIST,
    GLM,
    QWEN3_CODER,
    GEMMA4,
    HERMES,
    LLAMA3,
    PLAIN,
    NONE,
)
BY_NAME = {one.name: one for one in (*FORMATS, GENERIC)}


def format_of(info: ModelInfo, chosen: str, seen: Renderings) -> Format:
    """The model's format. `chosen`: `--chat-format`; `seen`: of the model's template. Call `scanner.load` before."""
    template = (info.chat_template or "") + (info.tool_template or "")
    found = BY_NAME[chosen] if chosen in BY_NAME else next(one for one in FORMATS if _has(one, template))
    if chosen not in BY_NAME and template:
        found = _found(info, found, seen, is_derived=chosen == DERIVED)
    # Calls that are told as text (`generic`) are no matter of the template's.
    found = replace(found, lone=seen.is_lone and can_call(found) and not found.instructs)
    if not found.reasoning or found.reasoning == thinking(seen):
        return found
    # Else it is a guess that the model thinks so: either its template or its tokens must have the marker.
    closer = found.reasoning[1]
    return found if closer in template or closer in info.added_tokens else replace(found, reasoning=None)


def _found(info: ModelInfo, family: Format, seen: Renderings, *, is_derived: bool) -> Format:
    """The format of a template that looks like a family's; `is_derived`: the family is second choice."""
    is_shown = has_tools(info, seen)
    if can_call(family) and is_shown and not is_derived:
        return family
    found = derived(seen, info.added_tokens, info.eos_tokens) if is_shown else None
    if found is None and can_call(family) and is_shown:
        return family
    return replace(found or GENERIC, reasoning=thinking(seen) or PLAIN.reasoning)


def can_call(one: Format) -> bool:
    """Whether calls in this format can be read."""
    return one.calls is not None or one.channels


def has_tools(info: ModelInfo, seen: Renderings) -> bool:
    """Whether the model's template has a place for tools."""
    if seen.has_tools is None:
        return "tools" in (info.chat_template or "") or info.tool_template is not None
    return seen.has_tools


def _has(one: Format, template: str) -> bool:
    return all(sign in template for sign in one.signs) and not any(sign in template for sign in one.others)
