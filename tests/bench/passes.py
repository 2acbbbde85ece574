"""Passes of the target by themselves: their width, their context, prompts, and the host's share of a step."""

from __future__ import annotations

from collections.abc import Sequence

from tests.bench.scene import Scene, alternating, middle
from tests.bench.stage import Stage, Task, random_tasks, random_tokens
from tests.gpu import ceilings as device_ceilings
from tests.gpu.setting import Finding, Findings

SHARED = 0.9  # of a prompt's tokens are cached
ROOM = 256  # tokens beside a context


def ceilings(scene: Scene) -> Findings:
    """What the device can do at most, and what a token needs of it."""
    for case in ("copy", "read"):
        yield from device_ceilings.run(scene.setting, case)
    yield Finding("bfloat16 matmul", None, {"TFLOP/s": scene.matmul_rate / 1e12})
    told = {"GB/s": scene.read_rate / 1e9, "weights, GB": scene.read_bytes / 1e9}
    yield Finding(
        "reading the weights once a token", None, {**told, "tokens/s": scene.read_rate / scene.read_bytes}
    )


def width(scene: Scene) -> Findings:
    """A pass of several rows, all but the first provisional, against one of one row."""
    contexts = scene.fitting(scene.setting.pick((512, 2048), (64,)))
    rows = scene.setting.pick((1, 2, 4, 8, 16, 32), (1, 4))
    stage = Stage(scene.lab, n_ctx=contexts[-1] + ROOM, captured=False)
    for n_past in contexts:
        seconds: dict[int, list[float]] = {n: [] for n in rows}
        for _, n in alternating(rows, scene.n_rounds):
            seconds[n].append(stage.pass_s(n_past, n))
        for n, took in seconds.items():
            told = {"context": n_past, "rows": n, "ms": 1e3 * middle(took)}
            ratio = middle([many / one for many, one in zip(took, seconds[1], strict=True)])
            yield Finding(f"pass of {n} rows after {n_past}", None, {**told, "x one row": ratio})


def context(scene: Scene) -> Findings:
    """A pass of one row by what lies behind it, against reading weights, keys and values once."""
    longest = (512, 1024, 2048, 4096, 8192, *((16_384, 32_768) if scene.setting.on_gpu else ()))
    contexts = scene.fitting(scene.setting.pick(longest, (64, 128)))
    stage = Stage(scene.lab, n_ctx=contexts[-1] + ROOM, captured=False)
    seconds: dict[int, list[float]] = {n: [] for n in contexts}
    for _, n in alternating(contexts, scene.n_rounds):
        seconds[n].append(stage.pass_s(n))
    for n, took in seconds.items():
        n_bytes = scene.read_bytes + n * scene.kv_bytes
        told = {"context": n, "ms": 1e3 * middle(took), "tokens/s": 1 / middle(took)}
        yield Finding(
            f"pass after {n} tokens", None, {**told, "of ceiling": n_bytes / scene.read_rate / middle(took)}
        )


def prompt(scene: Scene, asked: Sequence[int] = ()) -> Findings:
    """Time to the first token of new prompts, and of prompts of which an earlier one was 90 % the same.

    asked: their tokens; empty: the usual ones.
    """
    usual = (128, 512, 2048, *((8192, 32_768) if scene.setting.on_gpu else (4096,)))
    lengths = scene.fitting(asked or scene.setting.pick(usual, (256,)))
    stage = Stage(scene.lab, n_ctx=lengths[-1] + ROOM)
    for n in scene.timely(lengths):
        found = []
        for i in range(3 if n <= 2048 and not scene.setting.quick else 1):
            first, other = (
                random_tokens(n, 2 * i + j, min(4096, scene.lab.target.vocab_size)) for j in range(2)
            )
            shared = int(n * SHARED)
            cold, hit = (
                stage.play([Task("random", tokens, max_tokens=2)], tenant=f"{n} {i}").replies[0].ttft_s
                for tokens in (first, first[:shared] + other[shared:])
            )
            found.append((cold, hit, cold / hit))
        cold, hit, ratio = (middle(column) for column in zip(*found, strict=True))
        operations = 2 * n * scene.n_multiplied
        told = {"tokens": n, "first token, ms": 1e3 * cold, "tokens/s": n / cold}
        told |= {
            "of matmul": operations / cold / scene.matmul_rate,
            "90 % cached, ms": 1e3 * hit,
            "x sooner": ratio,
        }
        yield Finding(f"prompt of {n}", None, told)


def host(scene: Scene) -> Findings:
    """The part of a step of plain decoding in which no pass runs: planning, picking, text, events.

    With passes that overlap and without, on one engine. On CUDA a pass is timed without its launches, as a graph.
    """
    counts = scene.setting.pick((1, 8, 64) if scene.setting.on_gpu else (1, 8), (1, 2))
    stage = Stage(scene.lab, n_slots=counts[-1], n_ctx=512)
    for n in counts:
        took: dict[str, list[tuple[float, float]]] = {way: [] for way in scene.ways}
        for i, way in alternating(list(took), scene.n_rounds):
            stage.overlaps = scene.ways[way]
            took[way].append((step_s(stage, n, f"{n} {i}{way}"), stage.pass_s(212, 1, n)))
        for way, found in took.items():
            steps, passes = zip(*found, strict=True)
            told = {"streams": n, "overlaps": "yes" if scene.ways[way] else "no"}
            told |= {"step ms": 1e3 * middle(steps), "pass ms": 1e3 * middle(passes)}
            share = middle([1 - one / step for step, one in found])
            yield Finding(f"step of {n} streams{way}", None, {**told, "host": share})


def step_s(stage: Stage, n: int, tenant: str) -> float:
    """Seconds of a step of n streams together."""
    tasks = random_tasks(min(4096, stage.lab.target.vocab_size), n, 24)
    replies = stage.play(tasks, tenant=tenant).replies
    # All streams run together from the latest first token to the earliest last one.
    start = max(one.arrivals[0][0] for one in replies)
    end = min(one.arrivals[-1][0] for one in replies)
    return (end - start) / max(1, sum(start < at <= end for at, _ in replies[0].arrivals))


def memory(scene: Scene) -> Findings:
    """Bytes of a slot: states, keys and values of 8,192 tokens, rows parked for 16 drafts."""
    needs, dtype = scene.lab.target.needs, scene.lab.target.dtype
    state = sum(need.slot_bytes(dtype) for need in needs)
    parked, kv = 16 * sum(need.parked_bytes(dtype) for need in needs), 8192 * scene.kv_bytes
    told = {name: n / 2**20 for name, n in (("state", state), ("8,192 tokens", kv), ("parked rows", parked))}
    yield Finding("a slot, MiB", None, {**told, "x with parked rows": (state + kv + parked) / (state + kv)})
