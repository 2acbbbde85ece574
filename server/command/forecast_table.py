"""The printed output of `slipstream plan`: a forecast of GPU memory as a table; and the memory of GPUs by name."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

# GiB that a process finds free on an idle GPU, about: the driver and the process's own context take the rest.
GPUS = {
    "H200": 139.0,
    "H100": 78.5,
    "H100-NVL": 92.5,
    "A100-80": 78.5,
    "A100-40": 38.8,
    "B200": 177.0,
    "L40S": 43.8,
    "L4": 21.7,
    "5090": 30.8,
    "4090": 23.0,
    "3090": 23.0,
}
NOTHING = "-"
UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def memory_of(text: str) -> int:
    """The bytes that `--memory` means: a number of GiB, or a GPU's name. Raises ValueError."""
    name = re.sub(r"[\s_]+", "-", text.strip()).upper().removeprefix("RTX-").removesuffix("-80GB")
    if name in GPUS:
        return int(GPUS[name] * 2**30)
    if not re.fullmatch(r"\d+(\.\d+)?", text.strip()) or float(text) <= 0:
        raise ValueError(f"{text}: must be a number of GiB or one of {', '.join(GPUS)}")
    return int(float(text) * 2**30)


def table(plan: Mapping[str, Any]) -> str:
    """The figures of a forecast, as `dataclasses.asdict` gives them, with a verdict at the end."""
    return "\n".join([*_networks(plan), "", *_taken(plan), "", *_verdict(plan), ""])


def _networks(plan: Mapping[str, Any]) -> Iterator[str]:
    rows = [("", "dtype", "parameters", "weights", "K/V, a token", "state, a slot", "parked, a draft")]
    for store, one in plan["networks"].items():
        sizes = (_size(one[f"{part}_bytes"]) for part in ("weight", "token", "slot", "parked"))
        rows.append((store, one["dtype"], millions(one["n_params"]), *sizes))
    yield from aligned(rows)


def _taken(plan: Mapping[str, Any]) -> Iterator[str]:
    taken, slots = plan["taken"], f"{plan['n_slots']} slots"
    rows = [
        ("weights", _size(taken["weights"]), ""),
        ("image tower", _size(taken["tower"]), "what sees images (--no-vision leaves it)"),
        ("rotary tables", _size(taken["tables"]), f"{plan['n_ctx']} tokens (--ctx-size)"),
        ("recurrent states", _size(taken["states"]), f"{slots} (--parallel)"),
        ("parked rows", _size(taken["parked"]), f"{slots}, {plan['draft_max']} drafts each (--draft-max)"),
        ("windows", _size(taken["windows"]), slots),
        ("spare page", _size(taken["spare"]), "for padding of captured passes"),
        (
            "pages",
            _size(taken["pages"]),
            f"{plan['n_pages']} of {plan['page_size']} tokens, {_size(plan['page_bytes'])} each",
        ),
        ("total", _size(plan["total_bytes"]), _given(plan)),
    ]
    for name, size, remark in rows:
        if size != NOTHING or name == "pages":
            yield f"{name:<18}{size:>12}  {remark}".rstrip()


def _given(plan: Mapping[str, Any]) -> str:
    given = plan["memory_bytes"]
    return "" if given is None else f"of {_size(given)} (--memory)"


def _verdict(plan: Mapping[str, Any]) -> Iterator[str]:
    n_ctx, n_slots, each = plan["n_ctx"], plan["n_slots"], plan["pages_each"]
    if plan["refusal"] is not None:
        yield f"Does not fit: {plan['refusal']}."
    else:
        yield f"Fits: {plan['n_pages'] // each} × {n_ctx} tokens ({each} pages each) can be cached at once."
    if plan["needed_one"] is not None:
        one, every = _size(plan["needed_one"]), _size(plan["needed_all"])
        yield f"Free memory for one sequence of {n_ctx} tokens at a time: {one}; for {n_slots} at once: {every}."
    if plan["memory_bytes"] is not None:
        one, every = plan["longest_one"], plan["longest_all"]
        yield (
            f"Longest context for one sequence at a time: {one}; for {n_slots} at once: {every};"
            f" there are {plan['n_ctx_train']} positions."
        )


def aligned(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Columns as wide as their widest cell: names flush left, numbers flush right."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    for first, *rest in rows:
        yield "  ".join(
            [first.ljust(widths[0]), *(cell.rjust(n) for cell, n in zip(rest, widths[1:], strict=True))]
        )


def _size(n_bytes: int) -> str:
    if n_bytes == 0:
        return NOTHING
    power = min(int(math.log(n_bytes, 1024)), len(UNITS) - 1)
    return f"{n_bytes / 1024**power:.{2 if power else 0}f} {UNITS[power]}"


def millions(n: int) -> str:
    """A number of parameters as text, in billions or millions."""
    return f"{n / 1e9:.2f} B" if n >= 10**9 else f"{n / 1e6:.1f} M"
