"""How large a value becomes that a chat template asks for: computed before it is made, as making it cannot be stopped.

Sizes are characters or elements, and no less than what comes out; the escapes of quoted text are not counted, so that
text within lists may come out some times longer. Functions have the parameters of what they measure.
"""

from __future__ import annotations

import re
from collections.abc import Callable, ItemsView, Iterable, KeysView, Mapping, Sequence, ValuesView
from typing import Any

from jinja2.utils import Namespace

Text = str | bytes
# A conversion of printf's: its width and its precision are numbers, or * for a value that says them.
_CONVERSION = re.compile(r"%(?:\([^)]*\))?[-#0 +]*(\*|[0-9]*)(?:\.(\*|[0-9]*))?[a-zA-Z]")
_NUMBER = re.compile(r"[0-9]+")
_LINK = 60  # characters of a link's tags
_OWN = 32  # characters that a value without parts has around it, or of its own


def written(value: Any) -> int:
    """Characters of a value as text. Parts that several lists share are written each time, but looked at once."""
    return len(value) if isinstance(value, Text) else _n_chars(value, {})


def _n_chars(value: Any, known: dict[int, int]) -> int:
    """As `written`, of a part in a list; `known` holds those that have been looked at, by id."""
    if isinstance(value, Text):
        return len(value) + 3
    if isinstance(value, int):
        return value.bit_length() // 3 + 2
    parts = None if value is None or isinstance(value, float) else _parts(value)
    if parts is None:
        return _OWN
    found = known.get(id(value))
    if found is None:
        found = _OWN + 2 * len(parts)
        for one in parts:
            found += _n_chars(one, known)
        known[id(value)] = found
    return found


def _shape(value: Any, known: dict[int, tuple[int, int]]) -> tuple[int, int]:
    """How many parts a value has, itself included, and how deep they lie."""
    parts = None if isinstance(value, Text) else _parts(value)
    if parts is None:
        return 1, 0
    found = known.get(id(value))
    if found is None:
        inner = [_shape(one, known) for one in parts]
        depth = 1 + max((one for _, one in inner), default=0)
        found = known[id(value)] = 1 + sum(n for n, _ in inner), depth
    return found


def _parts(value: Any) -> Sequence[Any] | None:
    """What is written of a value that has parts."""
    if isinstance(value, list | tuple):
        return value
    if isinstance(value, Namespace):
        value = value._Namespace__attrs  # what its repr shows
    if isinstance(value, Mapping):
        return [*value, *value.values()]
    if isinstance(value, ItemsView):
        # Not the pairs, which are gone after a look: another's could have their ids.
        return [part for pair in value for part in pair]
    return list(value) if isinstance(value, KeysView | ValuesView) else None


def of_json(value: Any, indent: int | str | None = None, separators: Iterable[str] | None = None) -> int:
    """Characters of a value as JSON; `indent` and `separators` as json.dumps takes them."""
    width = 0 if indent is None else len(indent) if isinstance(indent, str) else max(0, indent)
    between = sum(map(len, separators or ()))
    if not width and not between:
        return written(value)
    n_parts, depth = _shape(value, {})
    return written(value) + n_parts * (between + 1 + width * depth)


def of_percent(text: Text, given: Any) -> int:
    """Characters of `text % given`."""
    values = given if isinstance(given, tuple) else given.values() if isinstance(given, Mapping) else (given,)
    found = _CONVERSION.findall(text if isinstance(text, str) else text.decode("latin-1"))
    widths = sum(int(one) for pair in found for one in pair if one.isdecimal())
    if any("*" in pair for pair in found):
        widths += sum(abs(one) for one in values if isinstance(one, int))
    sizes = [written(one) for one in values]
    inserted = len(found) * max(sizes, default=0) if isinstance(given, Mapping) else sum(sizes)
    return len(text) + widths + max(inserted, written(given) if len(found) else 0)


def of_format_spec(spec: str) -> int:
    """Characters that a format's width and precision ask for."""
    return sum(map(int, _NUMBER.findall(spec)))


# --- methods of texts: the text, then their arguments ---


def _replace(text: Text, old: Text, new: Text, count: int | None = -1) -> int:
    n_found = text.count(old)  # type: ignore[arg-type]
    if count is not None and count >= 0:
        n_found = min(n_found, count)
    return len(text) + n_found * max(0, len(new) - len(old))


def _join(text: Text, parts: Iterable[Any]) -> int:
    sizes = [len(one) for one in parts if isinstance(one, Text)]
    return (
        sum(sizes) + len(text) * len(sizes) if not isinstance(parts, Text) else len(parts) * (len(text) + 1)
    )


def _widened(text: Text, width: int, *_: Any) -> int:
    return max(len(text), width)


def _expandtabs(text: Text, tabsize: int = 8) -> int:
    return len(text) + text.count("\t" if isinstance(text, str) else b"\t") * max(0, tabsize)  # type: ignore[arg-type]


def _translate(text: Text, table: Any, **_: Any) -> int:
    values = table.values() if isinstance(table, Mapping) else table or ()
    return len(text) * max([1, *(len(one) for one in values if isinstance(one, str))])


METHODS: Mapping[str, Callable[..., int]] = {
    "replace": _replace,
    "join": _join,
    "center": _widened,
    "ljust": _widened,
    "rjust": _widened,
    "zfill": _widened,
    "expandtabs": _expandtabs,
    "translate": _translate,
}


# --- filters: the value, then their arguments ---


def _replaced(s: Any, old: Any, new: Any, count: int | None = None) -> int:
    if not isinstance(s, str):
        return written(s) * max(1, written(new))  # its text is not made to be looked at
    return _replace(s, str(old), str(new), count)


def _joined(value: Any, d: Any = "", attribute: Any = None) -> int:
    del attribute  # of the parts, of which it is not larger
    parts = list(value) if isinstance(value, Iterable) else []
    return written(parts) + len(parts) * written(d)


def _indented(s: str, width: int | str = 4, *_: Any, **__: Any) -> int:
    return len(s) + (s.count("\n") + 1) * (len(width) if isinstance(width, str) else max(0, width))


def _wrapped(
    s: str,
    width: int = 79,
    break_long_words: bool = True,  # noqa: FBT001, FBT002 - jinja's
    wrapstring: str | None = None,
    break_on_hyphens: bool = True,  # noqa: FBT001, FBT002
) -> int:
    del width, break_long_words, break_on_hyphens  # a line has a character at least
    return len(s) + (len(s) + 1) * len(wrapstring or "\n")


def _linked(value: str, *given: Any, **named: Any) -> int:
    around = sum(written(one) for one in (*given, *named.values()))
    return 10 * len(value) + (value.count(".") + value.count(":") + value.count("@")) * (_LINK + around)


def _formatted(value: Any, *args: Any, **kwargs: Any) -> int:
    return of_percent(value if isinstance(value, Text) else str(value), kwargs or args)


def _pretty(value: Any) -> int:
    n_parts, depth = _shape(value, {})
    return written(value) + n_parts * depth * 80


def _compared(value: Any, *_: Any, **__: Any) -> int:
    return written(value)


FILTERS: Mapping[str, Callable[..., int]] = {
    "replace": _replaced,
    "join": _joined,
    "center": lambda value, width=80: max(written(value), width),
    "indent": _indented,
    "wordwrap": _wrapped,
    "batch": lambda value, linecount, fill_with=None: linecount,
    "slice": lambda value, slices, fill_with=None: slices,
    "urlize": _linked,
    "format": _formatted,
    "string": written,
    "pprint": _pretty,
    "tojson": lambda value, ensure_ascii=False, indent=None, separators=None, sort_keys=False: of_json(
        value, indent, separators
    ),
    **dict.fromkeys(("sort", "unique", "min", "max", "groupby"), _compared),
}
