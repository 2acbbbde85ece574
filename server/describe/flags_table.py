"""Generates the table of settings in docs/settings.md from their metadata.

`python -m slipstream.server.describe.flags_table docs/settings.md [--check]` writes it between `<!-- flags -->` and
`<!-- /flags -->`; with --check nothing is written, and the exit status is 1 if the table is stale.
"""

from __future__ import annotations

import sys
from itertools import groupby

from slipstream.server.command.flags import OPTIONS, Option
from slipstream.server.command.foreign_flags import FOREIGN
from slipstream.server.describe.renewal import renew

START, END = "<!-- flags -->", "<!-- /flags -->"


def table() -> str:
    """One Markdown table per group, and of the flags that other servers have."""
    parts = []
    for group, options in groupby(OPTIONS, key=lambda one: one.group):
        rows = ["| Flag | Default | Meaning |", "|---|---|---|", *(_row(one) for one in options)]
        parts.append(f"**{group}**\n\n" + "\n".join(rows) + "\n")
    rows = [f"| {', '.join(f'`{flag}`' for flag in one.flags)} | {one.meaning} |" for one in FOREIGN]
    parts.append(
        "**Flags of llama-server**\n\n" + "\n".join(["| Flag | Meaning |", "|---|---|", *rows]) + "\n"
    )
    return "\n".join(parts)


def _row(option: Option) -> str:
    names = [f"`{flag}`" for flag in option.flags]
    if option.is_switch:
        names.insert(1, f"`{option.no_flag}`")
    meaning = option.meta["meaning"]
    if option.meta["choices"]:
        meaning += f" ({', '.join(option.meta['choices'])})"
    return f"| {', '.join(names)} | {_default(option)} | {meaning.replace('|', chr(92) + '|')} |"


def _default(option: Option) -> str:
    if option.is_switch:
        return "on" if option.default else "off"
    return "" if option.default in (None, "") else f"`{option.default}`"


def updated(text: str) -> str:
    """`text` with the table between the marks renewed. Raises ValueError where they are missing."""
    before, start, rest = text.partition(START)
    _, end, after = rest.partition(END)
    if not (start and end):
        raise ValueError(f"no {START} … {END} in the file")
    return f"{before}{START}\n{table()}{END}{after}"


def main(arguments: list[str]) -> int:
    return renew(arguments, updated)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
