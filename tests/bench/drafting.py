"""Decoding with drafters: by drafter and task against plain decoding, by number of streams, and tokens per pass."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass, replace

from tests.bench.playing import Reply
from tests.bench.scene import HISTORY, KINDS, Scene, alternating, middle
from tests.bench.stage import PLAIN, Played, Stage, demo_tasks
from tests.gpu.setting import Finding, Findings

N_MAX = 16
ACCEPTANCE_N_MAX, N_ACCEPTANCE = 8, 30


@dataclass(frozen=True, slots=True)
class Side:
    """One way to decode, and where."""

    stage: Stage
    types: tuple[str, ...] = PLAIN


def drafters(scene: Scene) -> Findings:
    """Plain decoding, every drafter alone, all that read text together, networks with `suffix` as servers have them.

    One stream. Each side recites the same replies, in turn with the others; medians over rounds of ratios within one.
    """
    sides = sides_of(scene)
    for kind in (*scene.setting.pick(KINDS, KINDS[:1]), "random"):
        tasks = scene.answered(sides["plain"].stage, kind)
        played: dict[str, list[Reply]] = {name: [] for name in sides}
        for i, name in alternating(list(sides), len(tasks)):
            side = sides[name]
            played[name] += side.stage.play([tasks[i]], side.types, N_MAX).replies
        plain = [rate(one) for one in played["plain"]]
        for name, replies in played.items():
            rates = [rate(one) for one in replies]
            ratios = [mine / other for mine, other in zip(rates, plain, strict=True)]
            told = {"task": kind, "drafter": name, "x plain": middle(ratios), "tokens/s": middle(rates)}
            told |= {"tokens a pass": length(replies), "replies": len(tasks)}
            if name == "plain":
                told["of ceiling"] = middle(rates) * scene.read_bytes / scene.read_rate
            yield Finding(f"{kind}, {name}", None, told)


def sides_of(scene: Scene) -> dict[str, Side]:
    """By name. A draft head reads every pass of the target, so each has an engine of its own."""
    draft = tuple(name for name in scene.networks if name == "draft-model")
    stage = Stage(scene.lab, (*HISTORY, *draft, "garbage"))
    sides = {"plain": Side(stage)}
    sides |= {name: Side(stage, (name,)) for name in (*HISTORY, *draft)}
    sides["all that read text"] = Side(stage, HISTORY)
    sides |= {f"suffix, {name}": Side(stage, ("suffix", name)) for name in draft}
    for name in scene.networks[len(draft) :]:
        own = Stage(scene.lab, ("suffix", name))
        sides |= {name: Side(own, (name,)), f"suffix, {name}": Side(own, ("suffix", name))}
    always = Stage(scene.lab, ("garbage",), adaptive=False)
    return sides | {
        "random guesses": Side(stage, ("garbage",)),
        "random guesses, always": Side(always, ("garbage",)),
    }


def rate(reply: Reply) -> float:
    """Tokens a second after the first."""
    seconds, n_tokens, _ = reply.decoding(len(reply.token_ids))
    return n_tokens / max(seconds, 1e-9)


def length(replies: Sequence[Reply]) -> float:
    """Tokens per pass of the target."""
    told = [one.decoding(len(one.token_ids)) for one in replies]
    return sum(n for _, n, _ in told) / max(1, sum(n_steps for *_, n_steps in told))


def concurrency(scene: Scene) -> Findings:
    """Tokens a second of several streams together, prompts cached, with the default drafters and without.

    Where servers let passes overlap, both also without that, on the same engine.
    """
    counts = scene.setting.pick((1, 2, 4, 8, 16, *((32, 64) if scene.setting.on_gpu else ())), (1, 2))
    stage = Stage(scene.lab, scene.auto, n_slots=counts[-1], n_ctx=512)
    pool = [task for kind in ("rename", "continue") for task in scene.answered(stage, kind)]
    sides = {
        f"{name}{way}": (types, overlaps)
        for name, types in (("plain", PLAIN), ("auto", scene.auto))
        for way, overlaps in scene.ways.items()
    }
    for n in counts:
        tasks = [pool[i % len(pool)] for i in range(2 * n)]
        stage.play(tasks[: len(pool)], scene.auto)  # prompts are cached, passes of this width are met
        played: dict[str, list[Played]] = {name: [] for name in sides}
        for _, name in alternating(list(sides), min(3, scene.n_rounds)):
            types, stage.overlaps = sides[name]
            played[name].append(stage.play(tasks, types, N_MAX, at_once=n))
        plain = [together(one) for one in played["plain"]]
        for name, found in played.items():
            rates = [together(one) for one in found]
            ratio = middle([mine / other for mine, other in zip(rates, plain, strict=True)])
            told = {"streams": n, "drafter": name, "tokens/s": middle(rates), "x plain": ratio}
            told["tokens a pass"] = length([reply for one in found for reply in one.replies])
            yield Finding(f"{n} streams, {name}", None, told)


def together(played: Played) -> float:
    """Tokens a second of all replies, from when they were asked for."""
    return sum(len(one.token_ids) for one in played.replies) / played.seconds


def acceptance(scene: Scene) -> Findings:
    """Tokens per pass of every drafter at a fixed draft length, cold, and where the prompt is cached."""
    n_tasks, most = scene.setting.pick((N_ACCEPTANCE, 192), (2, 24))
    every = (*HISTORY, *scene.networks)
    for name in scene.setting.pick(every, every[5:8]):
        stage = Stage(scene.lab, (name,), adaptive=False)
        for kind in scene.setting.pick(KINDS, KINDS[:1]):
            asked = demo_tasks(scene.lab, kind, n_tasks, most)
            tasks = stage.answered(asked, (name,))
            cold = stage.play(tasks, (name,), ACCEPTANCE_N_MAX, "cold").replies
            # A network's rows are cached as far as it was asked; behind a prompt without them it knows the reply alone.
            stage.play(
                [replace(task, reply=task.reply[:4]) for task in tasks], (name,), ACCEPTANCE_N_MAX, "hit"
            )
            hit = stage.play(tasks, (name,), ACCEPTANCE_N_MAX, "hit").replies
            n_cached = sum(one.done.usage.n_cached for one in hit if one.done)
            share = n_cached / sum(len(task.prompt) for task in tasks)
            told = {"task": kind, "drafter": name, "tokens a pass": length(cold)}
            yield Finding(f"{kind}, {name}", None, {**told, "after a hit": length(hit), "cached": share})


def prediction(scene: Scene) -> Findings:
    """Accepted share of predictions: the reference, of rename tasks whose reply is at least 0.95 similar to it."""
    stage = Stage(scene.lab, ("prediction",))
    asked = demo_tasks(scene.lab, "rename", scene.setting.pick(60, 4), 400)
    free = [replace(task, may_end=True) for task in asked]
    similar = [
        replace(task, expected=task.reference)
        for task, reply in zip(free, stage.play(free).replies, strict=True)
        if difflib.SequenceMatcher(None, reply.text, task.reference, autojunk=False).ratio() >= 0.95
    ]
    for n_max in scene.setting.pick((16, 32), (16,)):
        replies = stage.play(similar, ("prediction",), n_max).replies
        counts = [one.done.speculation.drafters["prediction"] for one in replies if one.done]
        n_tokens, n_accepted = (
            sum(len(one.token_ids) for one in replies),
            sum(one.n_accepted for one in counts),
        )
        told = {
            "n_max": n_max,
            "replies": len(replies),
            "tokens": n_tokens,
            "accepted": n_accepted / n_tokens,
        }
        told["rejected"] = sum(one.n_drafted - one.n_accepted for one in counts)
        yield Finding(f"predicted, {n_max} at most", None, told)
