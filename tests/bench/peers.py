"""The same prompts elsewhere: transformers in this process, other servers through their OpenAI endpoints.

Greedy, and equally many tokens, whatever a reply would end with. A rate is of the tokens after a reply's first, from
when that was there. What fails is one line of the report.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from typing import Any

import httpx

from tests.bench.drafting import N_MAX, rate
from tests.bench.scene import Scene, alternating, middle
from tests.bench.stage import PLAIN, Stage, Task, demo_tasks
from tests.bench.transformers_side import Rate, theirs
from tests.gpu.setting import Finding, Findings

PEER_TIMEOUT_S = 120.0  # between two chunks of a reply
OURS = "Slipstream, plain"
MOST_WHY = 200  # characters of a failure


def peers(scene: Scene) -> Findings:
    """Decoding here, in transformers, and on the servers of `--peer`, all against plain decoding here, in turn."""
    n_tasks, most = scene.setting.pick((3, 64), (1, 8))
    tasks = [task for kind in ("rename", "continue") for task in demo_tasks(scene.lab, kind, n_tasks, most)]
    sides = {**ours(scene), **theirs(scene), **{name: server(url) for name, url in scene.peers.items()}}
    rates: dict[str, list[float]] = {name: [] for name in sides}
    failed: dict[str, str] = {}
    first = [(0, name) for name in sides]  # calls at which things are loaded and compiled; they do not count
    for place, (i, name) in enumerate([*first, *alternating(list(sides), len(tasks))]):
        if name in failed:
            continue
        try:
            took = sides[name](tasks[i])
        except Exception as error:  # noqa: BLE001 - whatever it is, the others go on
            failed[name] = " ".join(f"{type(error).__name__}: {error}".split())[:MOST_WHY]
        else:
            rates[name] += [took] * (place >= len(first))
    for name, found in rates.items():
        if name in failed:
            yield Finding(name, None, {"why": failed[name]})
            continue
        for kind in ("rename", "continue"):
            places = [i for i, task in enumerate(tasks) if task.kind == kind]
            ratios = [found[i] / rates[OURS][i] for i in places]
            told = {"task": kind, "side": name, "tokens/s": middle([found[i] for i in places])}
            yield Finding(f"{kind}, {name}", None, {**told, "x our plain": middle(ratios)})


def ours(scene: Scene) -> dict[str, Rate]:
    """Plain decoding, `ngram-simple` and the server's default, on one engine."""
    stage = Stage(scene.lab, ("ngram-simple", *scene.auto))

    def side(types: Sequence[str]) -> Rate:
        return lambda task: rate(stage.play([task], types, N_MAX).replies[0])

    return {
        OURS: side(PLAIN),
        "Slipstream, ngram-simple": side(("ngram-simple",)),
        f"Slipstream, {' and '.join(scene.auto)}": side(scene.auto),
    }


# --- other servers ---


def server(url: str) -> Rate:
    """A server at an address, asked by chat; by completions if the address ends in `/v1/completions`."""
    base, completes, _ = url.rstrip("/").partition("/v1/completions")
    base = base.removesuffix("/v1")

    def play(task: Task) -> float:
        with httpx.Client(base_url=base, timeout=PEER_TIMEOUT_S) as client:
            name = client.get("/v1/models").raise_for_status().json()["data"][0]["id"]
            body = {"model": name, "max_tokens": task.max_tokens, "temperature": 0, "ignore_eos": True}
            body |= {"stream": True, "stream_options": {"include_usage": True}}
            if completes:
                return streamed(client, "/v1/completions", {**body, "prompt": task.text})
            return streamed(client, "/v1/chat/completions", {**body, "messages": list(task.messages)})

    return play


def streamed(client: httpx.Client, path: str, body: dict[str, Any]) -> float:
    """Tokens a second from a reply's first chunk with text to its last, by the server's own count of tokens.

    Raises ValueError for an answer that is refused, without usage, or shorter than was asked.
    """
    times, n_tokens = [], 0
    with client.stream("POST", path, json=body) as answer:
        if answer.status_code != 200:
            raise ValueError(f"status {answer.status_code}: {answer.read().decode(errors='replace')}")
        for chunk in chunks(answer.iter_lines()):
            if "error" in chunk:
                raise ValueError(f"the reply broke off: {chunk['error']}")
            told = [
                one.get("text") or (one.get("delta") or {}).get("content") for one in chunk.get("choices", ())
            ]
            if any(told):
                times.append(time.perf_counter())
            n_tokens = (chunk.get("usage") or {}).get("completion_tokens", n_tokens)
    if n_tokens != body["max_tokens"]:
        raise ValueError(f"{n_tokens} tokens instead of {body['max_tokens']}")
    if len(times) < 2:
        raise ValueError(f"{len(times)} chunks with text: no time passed between the first and the last")
    return (n_tokens - 1) / (times[-1] - times[0])


def chunks(lines: Iterator[str]) -> Iterator[dict[str, Any]]:
    """The JSON of server-sent events."""
    for line in lines:
        data = line.removeprefix("data:").strip()
        if line.startswith("data:") and data != "[DONE]":
            yield json.loads(data)
