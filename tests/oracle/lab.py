"""A bench for losslessness: engines built by hand over one checkpoint pair, and requests played through them.

Requests arrive at random, some are cancelled and sent again, slots are preempted when pages run out, and prompts
share prefixes. Whatever happens, a request's tokens must be those of plain decoding alone in one slot.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from engine.api import Delta, Done, EngineStats, Failed, Request, Sampling
from engine.cache.cache import Cache
from engine.cache.kv import KVStore
from engine.core.engine import Capacity, Engine
from engine.models.registry import load_network
from engine.sample.params import resolve_sampling
from engine.slot import Slot, SlotStats, SpeculateParams
from engine.speculate.chain import Chain
from engine.speculate.draft_model import DraftModel
from engine.speculate.drafter import Drafter
from engine.speculate.garbage import Garbage
from engine.speculate.length import Lengths
from engine.speculate.ngram_simple import NgramSimple
from engine.speculate.scripted import Scripted
from engine.text.stream import TextStream
from engine.text.tokenizer import Tokenizer
from kernels import select


@dataclass(frozen=True, slots=True)
class Case:
    """One request of the suite."""

    prompt: tuple[int, ...]
    sampling: Sampling
    n_max: int = 8
    max_tokens: int = 48


@dataclass(frozen=True, slots=True)
class Bench:
    """How an engine is built: drafters, slots, pages."""

    types: tuple[str, ...] = ()
    n_slots: int = 1
    n_pages: int = 512
    page_size: int = 16
    batch_size: int = 64
    adaptive: bool = True


@dataclass(slots=True)
class Played:
    """What came out of a run."""

    tokens: dict[int, list[int]] = field(default_factory=dict)  # per case, of the attempt that finished
    partial: list[tuple[int, list[int]]] = field(default_factory=list)  # of cancelled attempts
    done: dict[int, Done] = field(default_factory=dict)
    failed: dict[int, Failed] = field(default_factory=dict)
    stats: EngineStats | None = None
    n_cached: int = 0


class Lab:
    """A target and a draft of one dtype, loaded once."""

    def __init__(
        self, target: Path, draft: Path, dtype: torch.dtype, n_ctx: int = 1024, device: str = "cpu"
    ) -> None:
        where = torch.device(device)
        select(where, dtype)
        self.tokenizer = Tokenizer(target)
        self.n_ctx = n_ctx
        self.target = load_network(target, dtype, where, n_ctx, self.tokenizer.vocab_size)
        self.draft = load_network(draft, dtype, where, n_ctx + 64, self.tokenizer.vocab_size)

    def engine(self, bench: Bench, future: Callable[[Slot], Sequence[int]] | None = None) -> Engine:
        """A cold engine. `future` is what the scripted drafter knows."""
        networks = {"target": self.target, "draft": self.draft}
        stores = {
            name: KVStore(network.kv_layers, bench.n_pages, bench.page_size, network.dtype, network.device)
            for name, network in networks.items()
        }
        cache = Cache(stores, bench.n_slots, bench.n_pages, bench.page_size)
        lengths = Lengths(adaptive=bench.adaptive)
        drafters = [self._drafter(name, bench, cache, future) for name in bench.types]
        capacity = Capacity(
            n_slots=bench.n_slots,
            n_ctx=self.n_ctx,
            batch_size=bench.batch_size,
            eos_ids=self.tokenizer.eos_ids,
        )
        return Engine(self.target, cache, Chain(drafters, lengths), lengths, capacity)

    def _drafter(
        self, name: str, bench: Bench, cache: Cache, future: Callable[[Slot], Sequence[int]] | None
    ) -> Drafter:
        if name == "ngram-simple":
            return NgramSimple(3, 16, bench.n_slots)
        if name == "draft-model":
            return DraftModel(self.draft, cache, bench.batch_size)
        if name == "garbage":
            return Garbage(self.target.vocab_size)
        assert future is not None
        return Scripted(future, 0.8, self.target.vocab_size)

    def slot(self, slot_id: int, request_id: str, case: Case, types: tuple[str, ...]) -> Slot:
        """The slot state the service would make for this case."""
        sampling = resolve_sampling(case.sampling, {}, sorted(self.tokenizer.eos_ids), self.target.vocab_size)
        request = Request(id=request_id, prompt=case.prompt, sampling=case.sampling)
        n_limit = min(self.n_ctx, len(case.prompt) + case.max_tokens)
        speculate = SpeculateParams(types=types, n_max=case.n_max, n_min=0, p_min=0.0)
        return Slot(
            slot_id,
            request,
            list(case.prompt),
            len(case.prompt),
            n_limit,
            sampling,
            speculate,
            TextStream(self.tokenizer, case.prompt),
            stats=SlotStats(histogram=[0] * (case.n_max + 1)),
        )


def play(
    lab: Lab,
    bench: Bench,
    cases: Sequence[Case],
    *,
    seed: int = 0,
    cancel_share: float = 0.0,
    known: Mapping[int, Sequence[int]] | None = None,
) -> Played:
    """Run all cases through one engine, arriving at random; `cancel_share` of them are cancelled once."""
    random = np.random.default_rng(seed)

    def future(slot: Slot) -> Sequence[int]:
        assert known is not None
        return known[int(slot.request.id.split("#")[0])][slot.n_decoded :]

    engine = lab.engine(bench, future)
    played = Played()
    current: dict[str, list[int]] = {}
    pending = list(random.permutation(len(cases)))
    doomed = {i: int(random.integers(1, 12)) for i in pending if random.random() < cancel_share}

    def send(index: int, attempt: int) -> None:
        request_id = f"{index}#{attempt}"
        current[request_id] = []
        engine.add(request_id, lambda slot_id: lab.slot(slot_id, request_id, cases[index], bench.types))

    while pending or engine.busy:
        while pending and (not engine.busy or random.random() < 0.5):
            send(int(pending.pop()), 0)
        for request_id, event in engine.step():
            index = int(request_id.split("#")[0])
            if isinstance(event, Delta):
                current[request_id].extend(event.token_ids)
            elif isinstance(event, Done):
                played.tokens[index] = current.pop(request_id)
                played.done[index] = event
                played.n_cached += event.usage.n_cached
            else:
                current.pop(request_id)
                played.failed[index] = event
        for request_id in [one for one in current if one.endswith("#0")]:
            index = int(request_id.split("#")[0])
            if len(current[request_id]) >= doomed.get(index, 1 << 30):
                engine.cancel(request_id)
                played.partial.append((index, current.pop(request_id)))
                send(index, 1)
    played.stats = engine.stats()
    return played


def differences(played: Played, expected: Mapping[int, Sequence[int]]) -> tuple[int, int]:
    """(tokens compared, requests that differ anywhere)."""
    n_tokens = sum(len(tokens) for tokens in played.tokens.values())
    n_wrong = sum(list(tokens) != list(expected[i]) for i, tokens in played.tokens.items())
    for i, tokens in played.partial:
        n_tokens += len(tokens)
        n_wrong += list(tokens) != list(expected[i][: len(tokens)])
    return n_tokens, n_wrong
