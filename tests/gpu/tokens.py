"""Tokens a second through the engine on the inflated 8B demo: plain, with drafters, by prompt, width and streams.

Passes are launched ahead as a server does it, and plain and with the draft model one by one too. Time begins with a
reply's first token, and stops where the reply begins to loop. The texts must be the same. The goals are those that were
set for the kernels and for the engine.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch

from tests.bench import passes
from tests.bench.models import CACHE, load
from tests.bench.playing import Reply
from tests.bench.scene import NO_OVERLAP, Scene
from tests.bench.stage import Stage, Task, demo_tasks
from tests.gpu import kernel_times
from tests.gpu.setting import Figures, Finding, Findings, Setting, bar

# Drafters, and whether passes overlap.
CHAINS: dict[str, tuple[tuple[str, ...], bool]] = {
    "plain": ((), True),
    f"plain{NO_OVERLAP}": ((), False),
    "ngram-simple": (("ngram-simple",), True),
    "ngram-device": (("ngram-device",), True),
    "draft-model": (("draft-model",), True),
    f"draft-model{NO_OVERLAP}": (("draft-model",), False),
}
PASSES: dict[str, Callable[[Scene], Findings]] = {
    "width": passes.width,
    "context": passes.context,
    "host": passes.host,
}
N_CTX = 32_768 + 64
STREAMS = (1, 16)
PROMPTS = (512, 2048, 8192)
WIDTHS = {8: 1.05, 16: 1.10, 32: 1.25}  # rows of a pass at 2,048 tokens -> passes of one row it may take
HOST = {1: 0.03, 64: 0.10}  # streams -> share of a step without a pass, where passes overlap
SHARE = 0.85  # of the memory's rate at which plain decoding reads the weights
PROMPT_SHARE, PROMPT_FROM = 0.7, 2048  # of torch's product's rate, for prompts of so many tokens and more


def cases(setting: Setting) -> list[str]:
    return [
        "build",
        "plain",
        "profile",
        "prompts",
        *(f"streams {n}" for n in STREAMS),
        *[*CHAINS][1:],
        *PASSES,
    ]


def run(setting: Setting, case: str) -> Findings:
    if case == "build":
        started = time.perf_counter()
        one = scene(setting).lab
        draft = one.draft.n_params / 1e6 if one.draft else 0.0
        told = {"target, million": one.target.n_params / 1e6, "draft, million": draft}
        yield Finding("inflated demo", None, {**told, "seconds": time.perf_counter() - started})
    elif case == "profile":
        yield from profiled(setting)
    elif case == "prompts":
        yield from prompts(setting)
    elif case.startswith("streams"):
        yield from streams(setting, int(case.split()[1]))
    elif case in CHAINS:
        yield from decoding(setting, case)
    else:
        for found in PASSES[case](scene(setting)):
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


def prompts(setting: Setting) -> Findings:
    """Time to the first token, against what the products of a prompt take at the rate of torch's own."""
    for found in passes.prompt(scene(setting), setting.pick(PROMPTS, (256,))):
        yield found
        n, share = found.figures["tokens"], found.figures["of matmul"]
        if n >= PROMPT_FROM:
            label = f"prompt of {n}, share of torch's product"
            yield bar(label, share, f"{PROMPT_SHARE}", met=share >= PROMPT_SHARE)


def profiled(setting: Setting) -> Findings:
    """The kernels of plain decoding by the time they take, and the time between them."""
    stage = plain_stage(setting.device, setting.quick)
    (task,) = asked(setting, ("continue",), 1, setting.pick(48, 6))
    stage.play([task])  # its prompt is cached from here on
    with kernel_times.watched(setting.device) as watched:
        reply = stage.play([task]).replies[0]
    yield from kernel_times.table(watched.kernels, len(reply.arrivals))


def streams(setting: Setting, n: int) -> Findings:
    """Tokens a second of n streams together, plain and with drafters, on one engine."""
    sides: Mapping[str, tuple[str, ...]] = {
        "plain": (),
        "ngram-simple": ("ngram-simple",),
        "ngram-device": ("ngram-device",),
        "draft-model": ("draft-model",),
    }
    stage = Stage(scene(setting).lab, ("ngram-simple", "ngram-device", "draft-model"), n_slots=n, n_ctx=512)
    tasks = asked(setting, ("rename", "continue"), setting.pick(-(-n // 2), 1), setting.pick(96, 6))
    stage.play(tasks, at_once=n)  # prompts are cached
    rates, texts = {}, {}
    for name, types in sides.items():
        replies = stage.play(tasks, types, at_once=n).replies
        first, last = min(one.arrivals[0][0] for one in replies), max(one.arrivals[-1][0] for one in replies)
        n_tokens = sum(len(one.token_ids) for one in replies)
        rates[name], texts[name] = n_tokens / max(last - first, 1e-9), [one.token_ids for one in replies]
        told = {"tokens/s": rates[name], "x plain": rates[name] / rates["plain"]}
        yield Finding(f"{n} streams, {name}", None, told)
        if name != "plain":
            wrong = sum(a != b for a, b in zip(texts[name], texts["plain"], strict=True))
            told = {"tokens": n_tokens, "requests that differ": wrong}
            yield Finding(f"{n} streams, {name}: the text of plain decoding", wrong == 0, told)


def decoding(setting: Setting, case: str) -> Findings:
    """One stream; the text of plain decoding is proof that neither drafts nor overlapping passes lose anything."""
    replies, meant = played(setting, case), played(setting, "plain")
    seconds, n_tokens, n_steps = summed(replies)
    rate = n_tokens / max(seconds, 1e-9)
    told = {"tokens/s": rate, "tokens a step": n_tokens / n_steps, "ms a step": 1e3 * seconds / n_steps}
    if case == "plain":
        one = scene(setting)
        share = told["of weights / memory"] = rate * one.read_bytes / one.read_rate
        yield bar("plain decoding, share of memory", share, f"{SHARE}", met=share >= SHARE)
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


def scene(setting: Setting) -> Scene:
    """The 8B demo with the time that this part has."""
    made = _scene(setting.device, setting.quick)
    made.setting = setting
    return made


@functools.lru_cache(maxsize=1)
def _scene(device: torch.device, quick: bool) -> Scene:
    setting = Setting(device, quick, deadline=float("inf"))
    dtype = setting.pick(torch.bfloat16, torch.float32)
    name, n_ctx = setting.pick(("8B", N_CTX), ("small", 1024))
    return Scene(name, load(name, CACHE, dtype, device, n_ctx), setting, rounds=1)


@functools.lru_cache(maxsize=2)
def plain_stage(device: torch.device, quick: bool) -> Stage:
    """One slot, no drafters."""
    return Stage(_scene(device, quick).lab)


def asked(setting: Setting, kinds: Sequence[str], n_each: int, n_tokens: int) -> list[Task]:
    """Demo tasks that end where the target wants to."""
    lab = scene(setting).lab
    found = [task for kind in kinds for task in demo_tasks(lab, kind, n_each, n_tokens)]
    return [replace(task, may_end=True) for task in found]


def played(setting: Setting, case: str) -> Sequence[Reply]:
    """Replies to demo tasks one after the other, with the clock at every step; kept for each case."""
    key = (setting.device, setting.quick, case)
    if key not in _played:
        types, overlaps = CHAINS[case]
        lab = scene(setting).lab
        stage = plain_stage(*key[:2]) if case == "plain" else Stage(lab, types, overlaps=overlaps)
        n_each, n_tokens = setting.pick((3, 96), (1, 6))
        tasks = asked(setting, ("rename", "continue"), n_each, n_tokens)
        _played[key] = stage.play(tasks, types, at_once=1).replies
    return _played[key]


_played: dict[tuple[torch.device, bool, str], Sequence[Reply]] = {}


def summed(replies: Sequence[Reply]) -> tuple[float, int, int]:
    """(seconds, tokens, steps) of several replies, each up to its loop."""
    seconds, tokens, steps = zip(*(one.decoding(one.n_counted) for one in replies), strict=True)
    return sum(seconds), sum(tokens), max(1, sum(steps))
