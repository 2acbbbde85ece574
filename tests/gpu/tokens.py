"""Tokens a second of one stream through the engine, on the inflated 8B demo: plain, and with drafters.

Time begins with a reply's first token, and stops where the reply begins to loop. The texts must be the same.
"""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

import kernels
from engine.api import Delta, Failed
from tests.bench.playing import Reply
from tests.gpu.ceilings import copy_rate
from tests.gpu.inflated import InflatedLab
from tests.gpu.setting import Finding, Findings, Setting
from tests.oracle.lab import EIGHT, ROOT, Bench, Case
from tests.oracle.lossless import SAMPLINGS, demo_prompt

CHAINS = {"plain": (), "ngram-simple": ("ngram-simple",), "draft-model": ("draft-model",)}
N_CTX = 2048


@dataclass(slots=True)
class Sum:
    """What several replies took together."""

    seconds: float = 0.0
    n_tokens: int = 0
    n_steps: int = 0


def cases(setting: Setting) -> list[str]:
    return ["build", *CHAINS]


def run(setting: Setting, case: str) -> Findings:
    if case == "build":
        started = time.perf_counter()
        one = lab(setting)
        told = {"target, million": one.target.n_params / 1e6, "draft, million": one.draft.n_params / 1e6}
        yield Finding("inflated demo", None, {**told, "seconds": time.perf_counter() - started})
        return
    replies, meant = played(setting, case), played(setting, "plain")
    total = summed(replies)
    rate = total.n_tokens / max(total.seconds, 1e-9)
    told = {
        "tokens/s": rate,
        "tokens a step": total.n_tokens / max(total.n_steps, 1),
        "ms a step": 1e3 * total.seconds / max(total.n_steps, 1),
    }
    if case == "plain":
        told["of weights / copy"] = rate / limit(setting)
    else:
        plain = summed(meant)
        told["x plain"] = rate / max(plain.n_tokens / max(plain.seconds, 1e-9), 1e-9)
    yield Finding(f"{case}, {len(replies)} replies", None, told)
    if case != "plain":
        wrong = sum(a.token_ids != b.token_ids for a, b in zip(replies, meant, strict=True))
        n_tokens = sum(len(one.token_ids) for one in meant)
        told = {"tokens": n_tokens, "requests that differ": wrong}
        yield Finding(f"{case}: the text of plain decoding", ok=wrong == 0 and n_tokens > 0, figures=told)


@functools.lru_cache(maxsize=1)
def lab(setting: Setting) -> InflatedLab:
    dtype = setting.pick(torch.bfloat16, torch.float32)
    for one in (dtype, torch.float32):
        kernels.select(setting.device, one)
    return InflatedLab(dtype, setting.device, N_CTX, small=setting.quick)


def limit(setting: Setting) -> float:
    """Tokens a second if a token took the reading of every weight but the embedding, at the rate of a copy."""
    target = lab(setting).target
    embedding = target.decoder.embedding.weight
    return copy_rate(setting) / (target.weight_bytes - embedding.nbytes)


@functools.lru_cache(maxsize=4)
def played(setting: Setting, case: str) -> Sequence[Reply]:
    """Replies to demo tasks one after the other, with the clock at every step."""
    one = lab(setting)
    bench = Bench(
        CHAINS[case], n_slots=1, n_pages=N_CTX // 64 + 8, page_size=64, batch_size=512, draft_max=16
    )
    engine = one.engine(bench)
    if setting.on_gpu:
        engine.warm_up()
    with (ROOT / "demo" / "tasks.jsonl").open() as file:
        tasks = [json.loads(line) for line in file]
    n_each, n_tokens = setting.pick((3, 96), (1, 6))
    asked = [
        task for kind in ("rename", "continue") for task in [t for t in tasks if t["kind"] == kind][:n_each]
    ]
    replies = []
    for i, task in enumerate(asked):
        prompt = demo_prompt(one.tokenizer, task["messages"])[:1024]
        request = Case(prompt, SAMPLINGS["greedy"], EIGHT, n_tokens)
        reply = Reply(asked_s=time.perf_counter())
        engine.add(f"{i}#0", lambda slot, i=i, request=request: one.slot(slot, f"{i}#0", request, bench))
        while engine.busy:
            for _, event in engine.step():
                if isinstance(event, Failed):
                    raise event.error
                if isinstance(event, Delta):
                    reply.token_ids += event.token_ids
                    reply.arrivals.append((time.perf_counter(), len(reply.token_ids)))
        replies.append(reply)
    return replies


def summed(replies: Sequence[Reply]) -> Sum:
    total = Sum()
    for one in replies:
        seconds, n_tokens, n_steps = one.decoding(one.n_counted)
        total = Sum(total.seconds + seconds, total.n_tokens + n_tokens, total.n_steps + n_steps)
    return total
