"""Generates the page docs/api.md from the OpenAPI document.

`python -m slipstream.server.describe.api_page docs/api.md [--check]` writes it; with --check nothing is written, and
the exit status is 1 if the page is stale.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from fastapi.openapi.constants import REF_PREFIX

from slipstream.engine.settings import Settings
from slipstream.server.describe.openapi import STATUSES, document
from slipstream.server.describe.renewal import renew
from slipstream.server.http.app import create_app
from slipstream.server.http.gate import Gate
from slipstream.server.http.web_page import FILES
from slipstream.server.openai.absent import ABSENT
from slipstream.server.openai.refuse import IGNORED, REFUSED, described

Schema = Mapping[str, Any]
JSON = "application/json"
REFERENCE = re.compile(f'"{REF_PREFIX}(\\w+)"')
LIMITS = {
    "exclusiveMinimum": "above",
    "minimum": "at least",
    "minItems": "at least",
    "minLength": "at least",
    "exclusiveMaximum": "below",
    "maximum": "at most",
    "maxItems": "at most",
    "maxLength": "at most",
}
INTRO = """# HTTP API

Generated from the code by `make docs`; the same as data is at `/openapi.json`.

`null` means absent everywhere. Unknown fields are ignored and logged (`--strict-api`: refused); a known field is
honoured or refused by name, and a value outside its range is refused. Lowered to what the server has are
`speculative.n_max` (`--draft-max`), `speculative.n_min` (`n_max`), and `max_tokens` (to the context's end). With
`--api-key`, send `Authorization: Bearer KEY` or `X-Api-Key: KEY` to all paths but those marked *open*. Every reply
carries `x-request-id`.
"""


def page() -> str:
    """The page as Markdown."""
    made = document(create_app(Gate(), Settings(model="")).routes)
    paths, schemas = made["paths"], made["components"]["schemas"]
    bodies = _reached(
        [one["post"]["requestBody"] for one in paths.values() if "requestBody" in one.get("post", {})],
        schemas,
    )
    replies = _reached([one["responses"]["200"] for path in paths.values() for one in path.values()], schemas)
    parts = [
        INTRO,
        "## Endpoints\n\n" + _table(("Endpoint", "What", "Body", "Reply"), _endpoints(paths)),
        "Absent, answered 404 by name: " + "; ".join(_absent()) + ".\n",
        "## Fields\n",
        *(_fields(name, schemas[name]) for name in bodies),
        "## Refused fields\n\nA 400 `unsupported_value`, unless the value asks for nothing or the request's table above"
        " has the field.\n\n" + _table(("Reason", "Fields"), _refused()),
        "Accepted, without influence: " + ", ".join(f"`{name}`" for name in sorted(IGNORED)) + ".\n",
        "## Replies\n\nFields marked ? may be absent.\n",
        *(_fields(name, schemas[name], reply=True) for name in replies if name not in bodies),
        "## Errors\n\nThe body is an [Error](#error), with a status or, after a stream's first byte, as an event"
        " before `[DONE]`.\n\n" + _table(("Status", "Meaning", "`code`"), _statuses()),
    ]
    return "\n".join(parts)


def _table(head: tuple[str, ...], rows: Iterator[tuple[str, ...]]) -> str:
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    lines += ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]
    return "\n".join(lines) + "\n"


def _endpoints(paths: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    for path, methods in paths.items():
        if path in FILES and path != "/":
            continue
        for method, one in methods.items():
            if method != "head":
                yield _endpoint(f"{method}, head" if "head" in methods else method, path, one)


def _endpoint(methods: str, path: str, one: Mapping[str, Any]) -> tuple[str, ...]:
    query = "&".join(f"{each['name']}=…" for each in one.get("parameters", ()) if each["in"] == "query")
    name = f"`{methods.upper()} {path}{'?' + query if query else ''}`"
    body = one["requestBody"]["content"][JSON]["schema"] if "requestBody" in one else None
    ((media, reply), *_) = one["responses"]["200"]["content"].items()
    return (
        name + (" *open*" if one.get("security") == [] else ""),
        one["summary"],
        _kind(body) if body else "",
        _kind(reply["schema"]) if reply.get("schema") and media == JSON else media,
    )


def _absent() -> Iterator[str]:
    for what, paths, instead in ABSENT:
        names = ", ".join(f"`{path.replace('{rest:path}', '…')}`" for path in paths)
        yield f"{what} ({names}{'; use ' + instead if instead else ''})"


def _refused() -> Iterator[tuple[str, ...]]:
    for reason in dict.fromkeys(reason for reason, _ in REFUSED.values()):
        names = [f"`{name}`" for name, (why, _) in REFUSED.items() if why == reason]
        yield reason, ", ".join(names)


def _statuses() -> Iterator[tuple[str, ...]]:
    for status, (meaning, codes) in STATUSES.items():
        yield str(status), meaning, ", ".join(f"`{code}`" for code in codes)


def _reached(parts: list[Any], schemas: Mapping[str, Schema]) -> list[str]:
    """The names of the models that these parts of the document refer to, each once, a model before its own parts."""
    found: dict[str, None] = {}

    def visit(part: Any) -> None:
        for name in REFERENCE.findall(json.dumps(part)):
            if name not in found:
                found[name] = None
                visit(schemas[name].get("properties", {}))

    visit(parts)
    return list(found)


def _fields(model: str, schema: Schema, *, reply: bool = False) -> str:
    required = schema.get("required", ())
    listed = described()  # once, for all requests that do not have these fields themselves
    present, absent = ("", "?") if reply else (" *required*", "")
    rows = [
        (f"`{name}`{present if name in required else absent}", _kind(one), one.get("description", ""))
        for name, one in schema.get("properties", {}).items()
        if one != listed.get(name) and not name.startswith("speculative.")
    ]
    rows.sort(key=lambda row: "*required*" not in row[0])
    about = schema.get("description", "").replace("\n", " ") + "\n\n"
    return f"### {model}\n\n{about.lstrip()}" + _table(("Field", "Type", "Meaning"), iter(rows))


def _kind(schema: Schema) -> str:
    """A schema in a few words: `integer, 0 … 20`."""
    if "$ref" in schema:
        name = schema["$ref"].removeprefix(REF_PREFIX)
        return f"[{name}](#{name.lower()})"
    if forms := schema.get("anyOf", schema.get("oneOf")):
        return " or ".join(dict.fromkeys(_kind(one) for one in forms if one.get("type") != "null")) or "null"
    if "const" in schema or "enum" in schema:
        values = schema.get("enum", [schema.get("const")])
        return ", ".join(f"`{json.dumps(one).strip(chr(34))}`" for one in values)
    kind = schema.get("type", "any")
    items = f" of {_kind(schema.get('items', {}))}" if kind == "array" else ""
    return ("list" if items else kind) + _range(schema) + items


def _range(schema: Schema) -> str:
    """The limits of a schema's value or length in words; empty if it has none."""
    found = [f"{word} {_power(schema[name])}" for name, word in LIMITS.items() if name in schema]
    words = " … ".join(found)
    if len(found) == 2:
        words = re.sub("at (least|most) ", "", words)
    lead = ", " if schema.get("type") in ("integer", "number") else " of "
    return f"{lead}{words}{' characters' if schema.get('type') == 'string' else ''}" if found else ""


def _power(value: float) -> str:
    """A number as text; 2^31, 2^64 and what is 1 less are written as powers of two."""
    for power in (31, 64):
        for less in (0, 1):
            if value == 2**power - less:
                return f"2^{power}" + (" - 1" if less else "")
    return f"{value:g}"


def main(arguments: list[str]) -> int:
    return renew(arguments, lambda _: page())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
