"""An engine on the caller's thread, tasks played through it with the clock at every step, and single passes.

A task with a reply is *recited* (teacher-forced): wherever the target is asked, its logits say the reply's next token.
Drafts are made and judged as ever, so they survive where they foretell the reply, and all drafters write the same text.
The reply is the target's own up to where it begins to loop, because demo models do, and a loop is drafted perfectly.
Runs on a bare machine (`tests/gpu/bare.py`).
"""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from slipstream.engine.api import Delta, Done, Failed, Sampling, Speculate
from slipstream.engine.batch import AnyArray, Batch, Span, upload
from slipstream.engine.cache.store import Store
from slipstream.engine.core import forward
from slipstream.engine.core.engine import Engine
from slipstream.engine.core.seats import Seats
from slipstream.engine.layers.decoder import Taps
from slipstream.engine.models.network import Network
from slipstream.engine.slot import Slot
from tests.bench.playing import ROOT, Reply
from tests.gpu.clock import measure
from tests.oracle.lab import ASKS, Bench, Case, Lab
from tests.oracle.lossless import demo_prompt

GREEDY = Sampling(temperature=0.0, top_k=0, top_p=1.0, seed=1)
CERTAIN = 1e9  # a logit above all others
PLAIN: tuple[str, ...] = ()
PAGE, DRAFT_MAX = 64, 32
N_REPEATS = 5  # of a pass

_numbers = itertools.count()


@dataclass(frozen=True, slots=True)
class Task:
    """A prompt, and the reply to be recited; without one the target writes `max_tokens` tokens of its own."""

    kind: str
    prompt: tuple[int, ...]
    reply: tuple[int, ...] = ()
    max_tokens: int = 0
    messages: Sequence[Mapping[str, str]] = ()  # the prompt before the template, and after it as text
    text: str = ""
    reference: str = ""  # what a demo task is meant to be answered with
    expected: str | None = None  # the prediction that the request brings
    may_end: bool = False  # where the target wants to; otherwise end tokens are banned

    @property
    def n_tokens(self) -> int:
        return len(self.reply) or self.max_tokens


def demo_tasks(lab: Lab, kind: str, n: int, most: int) -> list[Task]:
    """The first demo tasks of a kind, to be answered freely in `most` tokens."""
    lines = (ROOT / "demo" / "tasks.jsonl").read_text().splitlines()
    found = []
    for one in [one for one in map(json.loads, lines) if one["kind"] == kind][:n]:
        prompt = demo_prompt(lab.tokenizer, one["messages"])
        text = lab.tokenizer.decode(prompt, skip_special=False)
        found.append(
            Task(
                kind, prompt, max_tokens=most, messages=one["messages"], text=text, reference=one["reference"]
            )
        )
    return found


def random_tokens(n: int, seed: int, vocab_size: int) -> tuple[int, ...]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(4, vocab_size, (n,), generator=generator).tolist())


def random_tasks(vocab_size: int, n: int, most: int) -> list[Task]:
    """Prompts of 200 random tokens with random replies: nothing to copy and nothing to foretell."""
    return [
        Task("random", random_tokens(200, 2 * i, vocab_size), random_tokens(most, 2 * i + 1, vocab_size))
        for i in range(n)
    ]


class Reciting:
    """The target's passes, but for their logits, which say what is to be recited; other slots are left alone.

    Where a row stands is looked up on the device: of a pass that was launched ahead the host does not know it.
    """

    def __init__(self, target: Network, n_slots: int, n_ctx: int) -> None:
        self._target = target
        # [n_slots, n_ctx] int64: the token behind each position; -1: what the target says
        self._behind = torch.full((n_slots, n_ctx), -1, device=target.device)

    def recite(self, slot_id: int, text: Sequence[int]) -> None:
        """What the slot's sequence is to be, from its first token on; empty: what the target makes of it."""
        behind = np.full(self._behind.shape[1], -1)
        behind[: max(0, len(text) - 1)] = text[1:]
        (known,) = upload((behind,), self._behind.device)
        self._behind[slot_id].copy_(known)

    def __call__(self, batch: Batch, store: Store, taps: Taps | None = None) -> Tensor:
        """As `Network.forward`: [n_logits, vocab] float32."""
        logits = self._target.forward(batch, store, taps)
        if not len(logits):
            return logits
        slot_ids, rows = upload(_asked(batch.spans), logits.device)
        said = self._behind[slot_ids, batch.positions[rows]].unsqueeze(1)  # [n_logits, 1] int64
        token_ids = said.clamp_min(0)
        return logits.scatter_(1, token_ids, torch.where(said < 0, logits.gather(1, token_ids), CERTAIN))


def _asked(spans: Sequence[Span]) -> tuple[AnyArray, AnyArray]:
    """The rows of a batch that have logits: (whose, which), [n_logits] int64 each."""
    ends = itertools.accumulate(len(span.token_ids) for span in spans)
    rows = [np.arange(end - span.n_logits, end) for span, end in zip(spans, ends, strict=True)]
    slot_ids = np.repeat([span.slot for span in spans], [span.n_logits for span in spans])
    return slot_ids, np.concatenate(rows)


@dataclass(slots=True)
class Played:
    """Replies in the order of their tasks, and how long they took together."""

    replies: list[Reply]
    seconds: float


class Stage:
    """One engine over a lab's networks, with the drafters `types`."""

    def __init__(
        self,
        lab: Lab,
        types: Sequence[str] = (),
        n_slots: int = 1,
        n_ctx: int = 1024,
        adaptive: bool = True,
        captured: bool | None = None,
        overlaps: bool | None = None,
        now: Callable[[], float] = time.perf_counter,
    ) -> None:
        """n_ctx: tokens that each slot has pages for, and as many again for prefixes.

        captured: whether passes are captured and replayed; overlaps: whether they are launched before the one before
        has been read. None: as a server does on the lab's device. now: by which the planner knows what work costs.
        """
        self.lab = lab
        n_pages = 2 * n_slots * (n_ctx // PAGE + 2)
        on_gpu = lab.target.device.type == "cuda"
        rows = 2048 if on_gpu else 128  # of a pass, as a server has it
        self.bench = Bench(
            types=tuple(types),
            n_slots=n_slots,
            n_pages=n_pages,
            page_size=PAGE,
            batch_size=rows,
            adaptive=adaptive,
            n_parked=DRAFT_MAX * n_slots,
            draft_max=DRAFT_MAX,
            n_window_pages=n_pages,
            captured=on_gpu if captured is None else captured,
            overlaps=on_gpu if overlaps is None else overlaps,
            now=now,
        )
        self.engine: Engine = lab.engine(self.bench)
        self._is_warm = False
        target = self.engine.target
        self._voice = Reciting(target.network, n_slots, lab.n_ctx)
        self.engine.target = replace(target, network=replace(target.network, captured=self._voice))
        self.engine.seats._seat = self._seat  # type: ignore[method-assign]
        self._recited: dict[Slot, tuple[int, ...]] = {}  # of those that wait

    @property
    def overlaps(self) -> bool:
        """As told at first. May be set between two plays, so that both ways are measured on one engine."""
        return self.engine.capacity.overlaps

    @overlaps.setter
    def overlaps(self, overlaps: bool) -> None:
        self.engine.capacity = replace(self.engine.capacity, overlaps=overlaps)

    def play(
        self,
        tasks: Sequence[Task],
        types: Sequence[str] = PLAIN,
        n_max: int = 16,
        tenant: str = "",
        at_once: int | None = None,
    ) -> Played:
        """The tasks, as many at a time as there are slots, or fewer. Requests of one tenant share cached prompts.

        n_max: most tokens of a draft, up to DRAFT_MAX. Raises AssertionError where what was to be recited did not come.
        """
        assert n_max <= DRAFT_MAX, f"drafts of {n_max} tokens, at most {DRAFT_MAX} here"
        if not self._is_warm:
            self.engine.warm_up()
            self._is_warm = True
        speculate = Speculate(types=tuple(types), n_max=n_max) if types else Speculate(n_max=0)
        replies: dict[str, Reply] = {}
        started = time.perf_counter()
        waiting = list(reversed(tasks))
        while waiting or self.engine.busy:
            n_running = sum(one.done is None for one in replies.values())
            for task in [
                waiting.pop() for _ in range(min(len(waiting), (at_once or len(tasks)) - n_running))
            ]:
                name = f"{next(_numbers)}#"
                replies[name] = Reply(asked_s=time.perf_counter())
                self.engine.add(self._slot(name, task, speculate, tenant))
            self._hear(replies)
        seconds = time.perf_counter() - started
        for task, reply in zip(tasks, replies.values(), strict=True):
            assert task.may_end or len(reply.token_ids) == task.n_tokens, "a reply ended early"
            assert not task.reply or tuple(reply.token_ids) == task.reply, "a reply is not what was recited"
        return Played(list(replies.values()), seconds)

    def answered(self, tasks: Sequence[Task], types: Sequence[str] = PLAIN, least: int = 16) -> list[Task]:
        """The tasks with the target's own replies, each up to its loop; without those that have too few tokens.

        types: what drafts meanwhile, which changes nothing but the time.
        """
        free = [replace(task, may_end=True) for task in tasks]
        found = []
        for task, reply in zip(tasks, self.play(free, types).replies, strict=True):
            told = [
                one for one in reply.token_ids[: reply.n_counted] if one not in self.engine.capacity.eos_ids
            ]
            if len(told) >= min(least, task.max_tokens):
                found.append(replace(task, reply=tuple(told)))
        return found

    def _slot(self, name: str, task: Task, speculate: Speculate, tenant: str) -> Slot:
        free = not task.reply and not task.may_end
        asks = replace(ASKS, tenant=tenant, min_tokens=task.max_tokens if free else 0)
        case = Case(task.prompt, GREEDY, speculate, task.n_tokens, asks=asks)
        expected = (
            [] if task.expected is None else self.lab.tokenizer.encode(task.expected, add_special=False)
        )
        slot = self.lab.slot(name, case, self.bench, expected)
        self._recited[slot] = (*task.prompt, *task.reply) if task.reply else ()
        return slot

    def _seat(self, slot: Slot) -> None:
        """Only from now on has the slot a number, under which passes ask what is to be recited."""
        self._voice.recite(slot.id, self._recited.pop(slot))
        Seats._seat(self.engine.seats, slot)

    def _hear(self, replies: dict[str, Reply]) -> None:
        """One step; what it says goes to the replies."""
        events = self.engine.step()
        now = time.perf_counter()
        for name, event in events:
            if isinstance(event, Failed):
                raise event.error
            if isinstance(event, Delta):
                replies[name].text += event.text
                replies[name].token_ids += event.token_ids
                replies[name].arrivals.append((now, len(replies[name].token_ids)))
            elif isinstance(event, Done):
                replies[name].done = event

    @torch.inference_mode()
    def pass_s(self, n_past: int, n_rows: int = 1, n_slots: int = 1) -> float:
        """Seconds of a pass of the target alone: spans of n_rows, all but their first provisional, after n_past tokens.

        What the cache holds of the context does not change the time, so nothing is computed for it.
        """
        cache, network = self.engine._cache, self.engine.target.network
        store = cache.stores[forward.STORE]
        spans = [Span(i, [5 + j for j in range(n_rows)], n_past, n_rows - 1, n_rows) for i in range(n_slots)]
        try:
            for span in spans:
                assert cache.reserve(span.slot, forward.STORE, 0, n_past), "too few pages"
                if store.parking is not None:
                    store.parking.reset(span.slot, n_past)
                cache.commit(span.slot, forward.STORE, n_past)
                assert cache.reserve(span.slot, forward.STORE, n_past, n_past + n_rows, n_rows - 1)
            batch = cache.batch(forward.STORE, spans)
            return measure([lambda: network.forward(batch, store)] * N_REPEATS, network.device).seconds
        finally:
            for span in spans:
                cache.drop(span.slot)
