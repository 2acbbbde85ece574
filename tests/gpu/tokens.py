"""Tokens a second through the engine on the inflated 8B demo: plain, with drafters, by width, context and streams.

Passes are launched ahead as a server does it, and plain and with the draft model one by one too.

The parts of `make bench` that matter most, in little time (tests/bench), and the goals that were set for them. Time
begins with a reply's first token, and stops where the reply begins to loop. The texts must be the same.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from tests.bench import drafting, passes
from tests.bench.models import CACHE, load
from tests.bench.playing import Reply
from tests.bench.scene import NO_OVERLAP, Scene
from tests.bench.stage import Stage, demo_tasks
from tests.gpu.setting import Figures, Finding, Findings, Setting
from tests.gpu.speed import bar

# Drafters, and whether passes overlap.
CHAINS: dict[str, tuple[tuple[str, ...], bool]] = {
    "plain": ((), True),
    f"plain{NO_OVERLAP}": ((), False),
    "ngram-simple": (("ngram-simple",), True),
    "draft-model": (("draft-model",), True),
    f"draft-model{NO_OVERLAP}": (("draft-model",), False),
}
PARTS: dict[str, Callable[[Scene], Findings]] = {
    "width": passes.width,
    "context": passes.context,
    "host": passes.host,
    "concurrency": drafting.concurrency,
}
N_CTX = 32_768 + 64
WIDTHS = {8: 1.05, 16: 1.10, 32: 1.25}  # rows of a pass at 2,048 tokens -> passes of one row it may take
HOST = {1: 0.03, 64: 0.10}  # streams -> share of a step without a pass, where passes overlap
SHARE = 0.85  # of a copy's rate at which plain decoding reads the weights


def cases(setting: Setting) -> list[str]:
    return ["build", *CHAINS, *PARTS]


def run(setting: Setting, case: str) -> Findings:
    if case == "build":
        started = time.perf_counter()
        one = scene(setting).lab
        draft = one.draft.n_params / 1e6 if one.draft else 0.0
        told = {"target, million": one.target.n_params / 1e6, "draft, million": draft}
        yield Finding("inflated demo", None, {**told, "seconds": time.perf_counter() - started})
    elif case in CHAINS:
        yield from decoding(setting, case)
    else:
        for found in PARTS[case](scene(setting)):
            yield found
            yield from goals(case, found.figures)


def goals(case: str, figures: Figures) -> Findings:
    """Whether the figures of a finding are what they should be, where that is known."""
    if case == "width" and figures["context"] == 2048 and figures["rows"] in WIDTHS:
        most = WIDTHS[figures["rows"]]
        ratio = figures["x one row"]
        yield bar(f"pass of {figures['rows']} rows, x one row", ratio, f"at most {most}", met=ratio <= most)
    if case == "host" and figures["streams"] in HOST and figures["overlaps"] == "yes":
        most, share = HOST[figures["streams"]], figures["host"]
        yield bar(f"host, {figures['streams']} streams", share, f"at most {most}", met=share <= most)


def decoding(setting: Setting, case: str) -> Findings:
    """One stream; the text of plain decoding is proof that neither drafts nor overlapping passes lose anything."""
    replies, meant = played(setting, case), played(setting, "plain")
    seconds, n_tokens, n_steps = summed(replies)
    rate = n_tokens / max(seconds, 1e-9)
    told = {"tokens/s": rate, "tokens a step": n_tokens / n_steps, "ms a step": 1e3 * seconds / n_steps}
    if case == "plain":
        one = scene(setting)
        share = told["of weights / copy"] = rate * one.read_bytes / one.read_rate
        yield bar("plain decoding, share of copy", share, f"{SHARE}", met=share >= SHARE)
    else:
        plain_s, n_plain, _ = summed(meant)
        told["x plain"] = rate / (n_plain / max(plain_s, 1e-9))
    yield Finding(f"{case}, {len(replies)} replies", None, told)
    if case != "plain":
        wrong = sum(a.token_ids != b.token_ids for a, b in zip(replies, meant, strict=True))
        told = {"tokens": sum(len(one.token_ids) for one in meant), "requests that differ": wrong}
        yield Finding(
            f"{case}: the text of plain decoding", ok=wrong == 0 and told["tokens"] > 0, figures=told
        )


@functools.lru_cache(maxsize=1)
def scene(setting: Setting) -> Scene:
    dtype = setting.pick(torch.bfloat16, torch.float32)
    name, n_ctx = setting.pick(("8B", N_CTX), ("small", 1024))
    return Scene(name, load(name, CACHE, dtype, setting.device, n_ctx), setting, rounds=1)


@functools.lru_cache(maxsize=4)
def played(setting: Setting, case: str) -> Sequence[Reply]:
    """Replies to demo tasks one after the other, with the clock at every step."""
    types, overlaps = CHAINS[case]
    stage = Stage(scene(setting).lab, types, overlaps=overlaps)
    n_each, n_tokens = setting.pick((3, 96), (1, 6))
    asked = [
        replace(task, may_end=True)
        for kind in ("rename", "continue")
        for task in demo_tasks(stage.lab, kind, n_each, n_tokens)
    ]
    return stage.play(asked, types, at_once=1).replies


def summed(replies: Sequence[Reply]) -> tuple[float, int, int]:
    """(seconds, tokens, steps) of several replies, each up to its loop."""
    seconds, tokens, steps = zip(*(one.decoding(one.n_counted) for one in replies), strict=True)
    return sum(seconds), sum(tokens), max(1, sum(steps))
