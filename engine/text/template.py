"""The environment in which a chat template runs: to the template it looks like that of transformers.

A template is untrusted data: it runs in jinja's sandbox, and what it may write is bounded.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Mapping
from datetime import datetime
from typing import Any

import jinja2
import jinja2.ext
from jinja2.sandbox import ImmutableSandboxedEnvironment

from slipstream.engine.errors import InvalidRequest, LoadError
from slipstream.engine.text.control import NONCHARACTERS

# Characters a rendered chat may have; a request body holds fewer, so only a runaway template writes more.
N_CHARS_MAX = 1 << 25
SECONDS_MAX = 10.0  # of rendering; looked at between the pieces that a template writes
# What a template's own code can raise; anything else is a fault of ours.
TEMPLATE_FAULTS = (
    jinja2.TemplateError,
    TypeError,
    ValueError,
    ArithmeticError,
    LookupError,
    AttributeError,
    RecursionError,
)
NOT_ASCII = re.compile(f"[^\\x00-\\x7f{''.join(NONCHARACTERS)}]")


class Generation(jinja2.ext.Extension):
    """{% generation %} … {% endgeneration %}: marks replies for training; here its body is just rendered."""

    tags = {"generation"}  # noqa: RUF012 - the name and type are jinja's

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        """The nodes of the body."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def raise_exception(message: str) -> None:
    """What a template calls to refuse a conversation."""
    raise jinja2.TemplateError(message)


def strftime_now(pattern: str) -> str:
    """The local time, for templates that write a date."""
    return datetime.now().strftime(pattern)


def to_json(
    value: Any,
    ensure_ascii: bool = False,  # noqa: FBT001, FBT002 - templates may pass it by position
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,  # noqa: FBT001, FBT002
) -> str:
    """JSON without jinja's HTML escapes. Noncharacters stay: they may be breaks (see control.py)."""
    text = json.dumps(value, ensure_ascii=False, indent=indent, separators=separators, sort_keys=sort_keys)
    return NOT_ASCII.sub(lambda found: json.dumps(found[0])[1:-1], text) if ensure_ascii else text


def environment() -> ImmutableSandboxedEnvironment:
    """A sandbox with the extensions, filters and functions that templates expect."""
    made = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, "jinja2.ext.loopcontrols"]
    )
    made.filters["tojson"] = to_json
    made.globals["raise_exception"] = raise_exception
    made.globals["strftime_now"] = strftime_now
    return made


def compile_template(source: str, where: str) -> jinja2.Template:
    """A template ready to render. Raises `LoadError` if it does not compile."""
    try:
        return environment().from_string(source)
    except (jinja2.TemplateError, RecursionError) as error:
        raise LoadError(f"{where}: the chat template does not compile ({error})") from None


def render(template: jinja2.Template, variables: Mapping[str, Any]) -> str:
    """What the template writes. Raises `InvalidRequest` if it refuses, fails, or takes or writes too much."""
    pieces: list[str] = []
    n_chars, started = 0, time.monotonic()
    try:
        for piece in template.generate(**variables):
            pieces.append(piece)
            n_chars += len(piece)
            if n_chars > N_CHARS_MAX:
                raise InvalidRequest("messages", f"the rendered chat has more than {N_CHARS_MAX} characters")
            if time.monotonic() - started > SECONDS_MAX:
                raise InvalidRequest(
                    "messages", f"the chat template takes more than {SECONDS_MAX:g} s for them"
                )
    except TEMPLATE_FAULTS as error:
        raise InvalidRequest("messages", f"the chat template refuses this conversation: {error}") from error
    return "".join(pieces)
