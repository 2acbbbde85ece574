"""The environment in which a chat template runs: to the template it looks like that of transformers.

A template is untrusted data: it runs in jinja's sandbox, and what it may write is bounded, as are values on the
way, before they are made (`template_sizes`). The clock is looked at in every turn of a loop and at every call, so that
it need not write to be stopped.
"""

from __future__ import annotations

import functools
import json
import math
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextvars import ContextVar
from datetime import datetime
from string import Formatter
from typing import Any

import jinja2
import jinja2.ext
from jinja2 import nodes
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment, SandboxedEscapeFormatter, SandboxedFormatter
from jinja2.visitor import NodeTransformer
from markupsafe import Markup

from slipstream.engine.errors import InvalidRequest, LoadError
from slipstream.engine.text import template_sizes as sizes
from slipstream.engine.text.control import NONCHARACTERS

# Characters a rendered chat may have; a request body holds fewer, so only a runaway template writes more.
N_CHARS_MAX = 1 << 25
SECONDS_MAX = 10.0  # of rendering
BITS_MAX = 4096  # of a number
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
SCOPES = ("_loop_vars", "_block_vars")  # what jinja passes besides the template's own keywords
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


# `time.monotonic` at which the rendering at hand is to have ended.
_deadline: ContextVar[float] = ContextVar("deadline", default=math.inf)


class _TakesTooMuchError(jinja2.TemplateError):
    """The template has run, or what it makes has grown, beyond a limit."""


def _look_at_clock() -> None:
    if time.monotonic() > _deadline.get():
        raise _TakesTooMuchError(f"it takes more than {SECONDS_MAX:g} s")


def _timed(values: Iterable[Any]) -> Iterator[Any]:
    until, now = _deadline.get(), time.monotonic
    for value in values:
        if now() > until:
            _look_at_clock()
        yield value


def _bounded(value: Any) -> Any:
    if isinstance(value, str | list | tuple) and len(value) > N_CHARS_MAX:
        _check_size(len(value))
    return value


def _check_size(n: int) -> None:
    if n > N_CHARS_MAX:
        raise _TakesTooMuchError(f"it makes a value of more than {N_CHARS_MAX} characters or elements")


def _sized(value: Any) -> Any:
    """The value, which is about to be written or compared."""
    if type(value) is not str:
        _check_size(sizes.written(value))
    return value


def _gathered(value: Any) -> Any:
    """The values of an iterator, which can be measured then; any other value as it is."""
    if not isinstance(value, Iterator):
        return value
    found: list[Any] = []
    for one in _timed(value):
        found.append(one)
        _check_size(len(found))
    return found


def _concat(pieces: Iterable[str]) -> str:
    """What a macro or a block has written."""
    pieces = list(pieces)
    _check_size(sum(map(len, pieces)))
    return "".join(pieces)


def _check_operation(operator: str, left: Any, right: Any) -> None:
    """Refuse what would be too large before it is made: a single operation cannot be stopped."""
    if isinstance(left, int) and isinstance(right, int):
        n_bits = (
            left.bit_length() * max(0, right) if operator == "**" else left.bit_length() + right.bit_length()
        )
        if n_bits > BITS_MAX:
            raise _TakesTooMuchError(f"it makes a number of more than {BITS_MAX} bits")
        return
    lengths = [len(one) for one in (left, right) if isinstance(one, str | bytes | list | tuple)]
    if operator == "%" and isinstance(left, str | bytes):
        _check_size(sizes.of_percent(left, right))
    elif lengths:
        _check_size(lengths[0] * max([0, *(one for one in (left, right) if isinstance(one, int))]))


class _Bounded(Formatter):
    """A formatter of `str.format` that counts what it makes, field by field."""

    n_chars = 0

    def format_field(self, value: Any, format_spec: str) -> Any:
        _look_at_clock()
        _check_size(sizes.of_format_spec(format_spec))
        made = super().format_field(_sized(value), format_spec)
        self.n_chars += len(made)
        _check_size(self.n_chars)
        return made

    def convert_field(self, value: Any, conversion: Any) -> Any:
        return super().convert_field(_sized(value), conversion)


class _Format(_Bounded, SandboxedFormatter):
    pass


class _EscapingFormat(_Bounded, SandboxedEscapeFormatter):
    pass


class _Sandbox(ImmutableSandboxedEnvironment):
    """jinja's sandbox with limits on time and on the size of values."""

    intercepted_binops = frozenset({"*", "**", "%"})
    concat = staticmethod(_concat)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        _check_operation(operator, left, right)
        return super().call_binop(context, operator, left, right)

    def call(self, context: Context, /, function: Any, *args: Any, **kwargs: Any) -> Any:
        _look_at_clock()
        for one in args:
            if type(one) is int:  # a width
                _check_size(one)
        owner = getattr(function, "__self__", None)
        if isinstance(owner, str | bytes):
            args = tuple(map(_gathered, args))
            if measure := sizes.METHODS.get(function.__name__):
                _check_size(measure(owner, *args, **{k: v for k, v in kwargs.items() if k not in SCOPES}))
        elif isinstance(owner, int):
            _check_size(max([0, *(one for one in kwargs.values() if isinstance(one, int))]))
        return super().call(context, function, *args, **kwargs)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """`str.format` and `format_map` in the sandbox, with limits."""
        if super().wrap_str_format(value) is None:
            return None
        text, takes_mapping = value.__self__, value.__name__ == "format_map"

        def formatted(*args: Any, **kwargs: Any) -> str:
            is_escaped = isinstance(text, Markup)
            formatter = _EscapingFormat(self, escape=text.escape) if is_escaped else _Format(self)
            if takes_mapping:
                (kwargs,), args = args, ()
            made: str = type(text)(formatter.vformat(text, args, kwargs))
            return made

        return formatted

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree: nodes.Template = _Limits().visit(super()._parse(source, name, filename))
        tree.set_environment(self)
        return tree


class _Limits(NodeTransformer):
    """Puts the clock into loops and the limit of size behind `~` and `+`, each of which at most doubles a value.

    And before what writes a value or compares two, as parts that lists share count each time there.
    """

    def visit_For(self, node: nodes.For) -> nodes.Node:  # noqa: N802 - jinja's names
        self.generic_visit(node)
        node.iter = _filtered(node.iter, "timed")
        return node

    def visit_Concat(self, node: nodes.Concat | nodes.Add) -> nodes.Node:  # noqa: N802
        return _filtered(self._sum(node), "bounded")

    visit_Add = visit_Concat  # noqa: N815

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        operands: list[nodes.Compare | nodes.Operand] = [node, *node.ops]
        if sum(isinstance(one.expr, nodes.Const) for one in operands) < len(operands) - 1:
            for one in operands:
                one.expr = _filtered(one.expr, "sized")
        return node

    def visit_Output(self, node: nodes.Output) -> nodes.Node:  # noqa: N802
        # What is written at once is counted where it arrives.
        node.nodes = [self._sum(one) for one in node.nodes]
        return node

    def _sum(self, node: nodes.Expr) -> Any:
        """The summands with their limits; the sum of a few needs none between."""
        if isinstance(node, nodes.Add):
            node.left, node.right = self._sum(node.left), self._sum(node.right)
        elif isinstance(node, nodes.Concat):
            parts = [self._sum(one) for one in node.nodes]
            node.nodes = [one if isinstance(one, nodes.Const) else _filtered(one, "sized") for one in parts]
        else:
            return self.visit(node)
        return node


def _filtered(node: nodes.Node, name: str) -> nodes.Filter:
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


def _measured(function: Callable[..., Any], measure: Callable[..., int]) -> Callable[..., Any]:
    """A filter that is refused where it would make too much."""
    n_own = 1 if hasattr(function, "jinja_pass_arg") else 0  # jinja's own arguments before the value

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        _look_at_clock()
        own, given = args[:n_own], [_gathered(one) for one in args[n_own:]]
        _check_size(measure(*given, **kwargs))
        return function(*own, *given, **kwargs)

    return call


def environment() -> ImmutableSandboxedEnvironment:
    """A sandbox with the extensions, filters and functions that templates expect."""
    extensions = [Generation, "jinja2.ext.loopcontrols"]
    made = _Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=extensions, finalize=_sized)
    made.filters["tojson"] = to_json
    made.filters |= {name: _measured(made.filters[name], measure) for name, measure in sizes.FILTERS.items()}
    made.filters |= {"timed": _timed, "bounded": _bounded, "sized": _sized}
    del made.globals["lipsum"]  # makes paragraphs of random words, as many as it is asked for
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
    n_chars = 0
    outer = _deadline.set(time.monotonic() + SECONDS_MAX)
    try:
        for piece in template.generate(**variables):
            pieces.append(piece)
            n_chars += len(piece)
            if n_chars > N_CHARS_MAX:
                raise InvalidRequest("messages", f"the rendered chat has more than {N_CHARS_MAX} characters")
    except TEMPLATE_FAULTS as error:
        raise InvalidRequest("messages", f"the chat template refuses this conversation: {error}") from error
    finally:
        _deadline.reset(outer)
    return "".join(pieces)
