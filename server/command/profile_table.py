"""The printed output of `slipstream profile`: a profile's figures as tables, with a column per run.

A run plays the same requests plainly or with drafts, so many of them at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from slipstream.server.command.forecast_table import NOTHING, aligned, millions


def prompts_of(path: Path) -> list[str]:
    """The prompts of a file, one a line; empty lines are skipped. Raises `OSError` and `ValueError`."""
    prompts = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    if not prompts:
        raise ValueError(f"{path}: holds no prompt; each line is one")
    return prompts


def table(profile: Mapping[str, Any]) -> str:
    """The figures of a profile, as `dataclasses.asdict` gives them."""
    runs = profile["runs"]
    about = (
        f"{profile['model']}: {millions(profile['n_params'])} parameters, {profile['dtype']} on {profile['device']},"
        f" {profile['threads']} CPU threads, drafters: {', '.join(profile['drafters']) or 'none'}"
    )
    ways = [f"{run['kind']} x {run['n_slots']}" for run in runs]
    tables = {
        "plain or with drafts x requests at a time": _speeds,
        "parts of a step: share, us": _parts,
        "ops: share of a step, calls a step, us a call": _ops,
        "passes of at most so many rows: how many, us each": _passes,
    }
    lines = [about]
    for title, rows in tables.items():
        lines += ["", title, *aligned([("", *ways), *rows(runs)])]
    return "\n".join([*lines, ""])


def _speeds(runs: Sequence[Mapping[str, Any]]) -> Iterator[Sequence[str]]:
    figures: dict[str, Callable[[Mapping[str, Any]], str]] = {
        "tokens": lambda run: str(run["n_tokens"]),
        "tokens/s": lambda run: f"{run['n_tokens'] / run['seconds']:.1f}",
        "steps": lambda run: str(run["n_steps"]),
        "tokens a step": lambda run: f"{run['n_tokens'] / run['n_steps']:.2f}",
        "us a step": lambda run: f"{1e6 * sum(run['parts'].values()) / run['n_steps']:.0f}",
    }
    for name, figure in figures.items():
        yield name, *(figure(run) for run in runs)


def _parts(runs: Sequence[Mapping[str, Any]]) -> Iterator[Sequence[str]]:
    for part in runs[0]["parts"]:
        yield part, *(_share(run["parts"][part], sum(run["parts"].values()), run["n_steps"]) for run in runs)


def _share(seconds: float, whole: float, n: int) -> str:
    return f"{seconds / whole:6.1%} {1e6 * seconds / n:8.1f}"


def _ops(runs: Sequence[Mapping[str, Any]]) -> Iterator[Sequence[str]]:
    """A row per op; the op with the most time in all runs comes first."""
    names = {name for run in runs for name in run["ops"]}
    whole = {name: sum(run["ops"][name]["seconds"] for run in runs if name in run["ops"]) for name in names}
    for name in sorted(names, key=lambda one: -whole[one]):
        yield name, *(_op(run["ops"].get(name), run) for run in runs)


def _op(op: Mapping[str, Any] | None, run: Mapping[str, Any]) -> str:
    if op is None:
        return NOTHING
    n, seconds = op["n_calls"], op["seconds"]
    return f"{seconds / run['ops_steps_s']:6.1%} {n / run['ops_steps']:6.1f} {1e6 * seconds / n:8.1f}"


def _passes(runs: Sequence[Mapping[str, Any]]) -> Iterator[Sequence[str]]:
    for n_rows in sorted({n for run in runs for n in run["passes"]}):
        cells = (run["passes"].get(n_rows) for run in runs)
        yield (
            str(n_rows),
            *(NOTHING if one is None else f"{one[0]:6} {1e6 * one[1] / one[0]:8.0f}" for one in cells),
        )
