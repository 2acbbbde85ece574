"""The shape of calls, as literal texts around names and arguments, and the `Format` it makes: a reader and a grammar.

    before [open NAME middle ARGUMENTS close]… after          with `between` from call to call

ARGUMENTS are a JSON object, or parameters with a literal text around each key and value. A literal may have holes, for
what differs from call to call: an id or a number. Readers take any white space where a literal has some.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from slipstream.server.openai.formats.enforce import (
    Rules,
    any_of,
    parameter,
    parameters,
    quoted,
    repeated,
    schema_of,
)
from slipstream.server.openai.formats.format import Calls, Format, Mark, Reader, Tool, Tools
from slipstream.server.openai.formats.json_call import HeadedJson, JsonCalls, Keys
from slipstream.server.openai.formats.schemas import choices_of
from slipstream.server.openai.formats.value_types import types_of
from slipstream.server.openai.formats.xml_call import Tags, XmlCall

ID, COUNT = "\ue000", "\ue001"  # holes: an id, a number
IN_HOLE = {ID: r"[\w.:-]*", COUNT: r"\d*"}
OF_HOLE = {ID: "/[A-Za-z0-9]{9}/", COUNT: "/[0-9]+/"}
NAME = r"(?P<name>[\w.-]+?)"
MARK = re.compile(r"<[^<>\s][^<>]*>|\[/?[A-Z][A-Z_]*\]")


@dataclass(frozen=True, slots=True)
class Parameters:
    """The literals of parameters: `open` KEY `middles[type]` VALUE `close`, one after another with `between`."""

    open: str
    middles: tuple[tuple[str, str], ...]  # by the JSON type of the value
    close: str
    between: str
    cdata: bool = False  # a value may stand in <![CDATA[…]]>


@dataclass(frozen=True, slots=True)
class Region:
    """What begins a call or a list of calls, the literal after it, what ends it, and the literal before that."""

    opener: str
    rest: str
    closer: str | None
    foot: str
    is_one: bool  # there is one call in it


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """How calls are written. `keys`: of a JSON object that holds both name and arguments; None: the name is outside."""

    before: str = ""
    open: str
    middle: str
    close: str
    between: str | None = None  # None: there is one call at most
    after: str = ""
    keys: Keys | None = None
    parameters: Parameters | None = None  # None: the arguments are JSON
    elsewhere: str = ""  # other text of replies, in which no marker of calls may occur

    @property
    def texts(self) -> tuple[str, ...]:
        """All literals."""
        inner = self.parameters
        own = (self.before, self.open, self.middle, self.close, self.between or "", self.after)
        return (
            own
            if inner is None
            else (*own, inner.open, *(one for _, one in inner.middles), inner.close, inner.between)
        )

    @property
    def region(self) -> Region | None:
        """A call's own markers if it has such, else those around all calls. None if nothing marks a call."""
        for is_one, first, last in ((True, self.open, self.close), (False, self.before, self.after)):
            opener = self._opener(first)
            if opener:
                closer = self._closer(last)
                foot = last[: last.rindex(closer)] if closer else last
                rest = first[first.index(opener) + len(opener) :]
                return Region(opener, rest, closer, foot, is_one=is_one and closer is not None)
        return None

    def _opener(self, text: str) -> str | None:
        """The shortest beginning of the text that ends with a marker and occurs once; or all, if it begins like one."""
        text = text.strip()
        if not text.startswith(("<", "[", "]")) or text.strip("[{\"' \n") == "":
            return None
        found = [text[: one.end()] for one in MARK.finditer(text)]
        if "{" not in text:
            found.append(text)
        return next((one for one in found if self._is_unique(one)), None)

    def _closer(self, text: str) -> str | None:
        """The shortest end of the text that begins with a marker and occurs once."""
        text = text.rstrip()
        marks = [one.start() for one in MARK.finditer(text)]
        return next((text[i:] for i in reversed(marks) if text[i:] and self._is_unique(text[i:])), None)

    def _is_unique(self, text: str) -> bool:
        return sum(one.count(text) for one in self.texts) == 1 and text not in self.elsewhere

    def format(self, plain: Format, tokens: Collection[str]) -> Format | None:
        """The format `plain` with such calls; None if nothing marks a call. `tokens`: beside the model's words."""
        region = self.region
        if region is None:
            return None
        around = (self.before, self.after) if region.opener in self.open else ()
        between = tuple(one.strip() for one in around if one.strip())
        joined = "\n".join([*self.texts, *plain.markers])
        inside = tuple(sorted(one for one in tokens if one in joined and one.strip()))
        return replace(
            plain,
            calls=Calls(region.opener, region.closer, self._reader, begins=self._begins(region)),
            between=between,
            inside=inside,
            enforced=Enforced(self, inside),
        )

    def _begins(self, region: Region) -> str:
        """The pattern of the first character behind the marker: of a literal, or of an id or a name."""
        rest = region.rest if region.opener in self.open else region.rest + self.open
        first = rest.strip()[:1]
        return re.escape(first) if first and first not in IN_HOLE else r"\w"

    def _reader(self, marker: str, tools: Tools) -> Reader:
        if self.keys:
            return JsonCalls(marker, keys=self.keys)
        region = self.region
        assert region is not None
        if self.parameters:
            return XmlCall(marker, self._tags(region, self.parameters), tools)
        first = region.rest if region.opener in self.open else region.rest + self.open
        later = self.close + (self.between or "") + self.open
        head = as_regex(first) if region.is_one else f"(?:{as_regex(first)}|{as_regex(later)})"
        foot = as_regex(region.foot) if region.opener in self.open else as_regex(self.close + region.foot)
        return HeadedJson(
            marker,
            re.compile(rf"\s*{head}{NAME}{as_regex(self.middle)}"),
            re.compile(rf"\s*(?:{foot})?\s*"),
            self.open.count("{") + self.middle.count("{"),
        )

    def _tags(self, region: Region, inner: Parameters) -> Tags:
        key, value = r"(?P<key>[^<>]*?)", "(?P<value>.*?)"
        if inner.cdata:
            value = rf"(?:<!\[CDATA\[)?{value}(?:\]\]>)?"
        middle = _any_middle([one for _, one in inner.middles])
        lead = inner.close[: len(inner.close) - len(inner.close.lstrip())]
        close = _optional(lead) + as_regex(inner.close.strip())
        return Tags(
            head=re.compile(rf"\s*{as_regex(region.rest)}{NAME}{as_regex(self.middle)}\s*"),
            parameter_start=inner.open.strip(),
            parameter=re.compile(rf"\s*{as_regex(inner.open.strip())}{key}{middle}{value}{close}", re.DOTALL),
            parameter_end=inner.close.strip(),
            foot=re.compile(rf"\s*(?:{as_regex(region.foot.strip())})?\s*\Z"),
            foot_start=re.split(rf"[\s{ID}{COUNT}]", region.foot.strip(), maxsplit=1)[0],
        )


@dataclass(frozen=True, slots=True)
class Enforced:
    """The grammar of calls of a shape, of its own literals: what the template shows is what is forced."""

    shape: Shape
    tokens: tuple[str, ...]  # in the literals

    def __call__(self, tools: Sequence[Tool], mark: Mark, *, many: bool) -> str:
        shape = self.shape
        rules = Rules(self._literally(mark))
        call = any_of(rules, tools, self._call)
        calls = repeated(call, rules.mark(shape.between or ""), many=many and shape.between is not None)
        return rules.source(f"{rules.mark(shape.before.lstrip())} {calls} {rules.mark(shape.after.rstrip())}")

    def _literally(self, mark: Mark) -> Mark:
        """From a literal to its Lark text: its tokens, its holes, and what is left as strings."""
        marks = "|".join(map(re.escape, sorted(self.tokens, key=len, reverse=True))) or "(?!)"
        pieces = re.compile(f"({marks}|[{ID}{COUNT}])")
        return lambda text: " ".join(OF_HOLE.get(one) or mark(one) for one in pieces.split(text) if one)

    def _call(self, rules: Rules, tool: Tool) -> str:
        shape, mark = self.shape, rules.mark
        open_ = shape.open if shape.before.strip() else shape.open.lstrip()
        head = f"{mark(open_)} {quoted(tool.name)} {mark(shape.middle)}"
        close = shape.close if shape.after.strip() else shape.close.rstrip()
        inner = shape.parameters
        if inner is None:
            return f"{head} {rules.arguments(tool)} {mark(close)}"

        stripped = inner.close.lstrip()
        between = rules.add(f"({mark(inner.between)})?") if inner.between else ""

        def tag(key: str) -> str:
            schema = schema_of(tool, key)
            kinds = types_of(schema, tool.parameters)
            middle = dict(inner.middles)[next(iter(kinds)) if len(kinds) == 1 else "object"]
            # White space before a token counts as part of a free text.
            is_free = (
                kinds == {"string"} and choices_of(schema) is None and not mark(stripped).startswith('"')
            )
            end = stripped if is_free else inner.close
            before = f"{mark(inner.open)} {quoted(key)} {mark(middle)}"
            return f"{before} {parameter(rules, tool, key, end)} {between}"

        return f"{head} {parameters(tool, tag)} {mark(close)}"


def as_regex(text: str) -> str:
    """A literal as a pattern: any white space for its white space, and words or numbers for its holes."""
    parts = re.split(rf"(\s+|[{ID}{COUNT}])", text)
    return "".join(r"\s*" if one.isspace() else IN_HOLE.get(one, re.escape(one)) for one in parts)


def _any_middle(middles: Sequence[str]) -> str:
    """A pattern of any of the literals, which differ by an attribute at most; white space at the end is optional."""
    first = min(middles, key=len)
    n_before = next((i for i, char in enumerate(first) if any(one[i] != char for one in middles)), len(first))
    rest = min((one[n_before:] for one in middles), key=len)
    n_after = next(
        (i for i in range(len(rest)) if any(one[-1 - i] != rest[-1 - i] for one in middles)), len(rest)
    )
    tail = first[len(first) - n_after :] if n_after else ""
    differing = "" if len(set(middles)) == 1 else r"[^<>]*?"
    head = first[:n_before]
    if not differing:
        head, tail = "", first
    space = tail[len(tail.rstrip()) :]
    return as_regex(head) + differing + as_regex(tail.rstrip()) + _optional(space)


def _optional(text: str) -> str:
    return f"(?:{re.escape(text)})?" if text else ""
