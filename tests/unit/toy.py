"""A network without weights: each row's logits are a hash of every token before it, read back from the cache.

A wrong page, length or order anywhere changes the text, so engine tests need no real model.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from slipstream.engine.api import Request, Sampling
from slipstream.engine.batch import Batch
from slipstream.engine.cache.cache import Cache
from slipstream.engine.cache.kv import KV
from slipstream.engine.cache.need import Sizes
from slipstream.engine.cache.store import Store
from slipstream.engine.core.engine import Engine
from slipstream.engine.core.plan import Capacity
from slipstream.engine.core.queue import Waiting
from slipstream.engine.core.slot_factory import Prepared, SlotFactory
from slipstream.engine.layers.decoder import Taps
from slipstream.engine.settings import Settings
from slipstream.engine.slot import Slot
from slipstream.engine.speculate.acceptance import Acceptance, coupled
from slipstream.engine.speculate.chain import Chain
from slipstream.engine.speculate.decide.value import Lengths
from slipstream.engine.speculate.drafter import Drafter
from slipstream.engine.text.token_places import Place
from slipstream.kernels import select
from tests.wound_clock import WoundClock

VOCAB = 32
CPU = torch.device("cpu")


class Words:
    """Stands in for a `TextStream`: token 7 is the word "w7 "."""

    def __init__(self, stop: str | None = None) -> None:
        self.stopped: str | None = None
        self._stop = stop

    def restarted(self, prompt_ids: list[int], token_ids: list[int], n_min: int = 0) -> Words:
        return Words(self._stop)

    def token_bytes(self, token_id: int) -> bytes:
        return f"w{token_id} ".encode()

    def pieces(self, token_ids: list[int]) -> list[str]:
        return [f"w{token_id} " for token_id in token_ids]

    def guessed(self, before: list[int], token_ids: list[int]) -> tuple[str, ...]:
        return tuple(f"w{token_id} " for token_id in token_ids)

    def push(self, token_id: int, *, may_stop: bool = True) -> str:
        word = f"w{token_id} "
        if may_stop and self._stop == word:
            self.stopped = word
            return ""
        return word

    def flush(self, *, n_left_out: int = 0) -> str:
        return ""

    @property
    def has_all_begun(self) -> bool:
        return True

    def begun(self) -> list[Place]:
        return []


@dataclass
class ToyNetwork:
    """Implements what the engine uses of a `Network`."""

    spoil: Callable[[Batch, Tensor], None] = field(default=lambda batch, logits: None)
    agreement: float = 1.0  # share of rows on which it equals the toy with agreement 1
    memory: int = 1 << 20  # tokens before a row that its logits depend on
    n_passes: int = 0
    n_tapped: int = 0  # passes whose streams were asked for
    device: torch.device = CPU
    dtype: torch.dtype = torch.float32
    vocab_size: int = VOCAB
    needs: list[KV] = field(default_factory=lambda: [KV(1, 1)])

    def forward(self, batch: Batch, store: Store, taps: Taps | None = None) -> Tensor:
        """[n_logits, VOCAB] float32. The only stream, tap 0, is the tokens themselves: [n_tokens, 1] float32."""
        self.n_passes += 1
        if taps is not None:
            self.n_tapped += 1
            taps.put(0, batch.token_ids.float()[:, None])
        cells = store.layers[0].keys[:, 0, :, 0]  # [n_pages, page_size]
        cells[batch.row_pages, batch.row_offsets] = batch.token_ids.float()
        size = cells.shape[1]
        rows = []
        for row in batch.logit_index.tolist():
            span = int(torch.searchsorted(batch.span_starts, row, right=True)) - 1
            seen = np.arange(int(batch.n_past[span]) + row - int(batch.span_starts[span]) + 1)
            pages = batch.page_table[span].numpy()[seen // size]
            rows.append(self._logits(cells[pages, seen % size].numpy().astype(np.int64)))
        logits = torch.from_numpy(np.array(rows, dtype=np.float32).reshape(-1, VOCAB))
        self.spoil(batch, logits)
        return logits

    def _logits(self, tokens: np.ndarray) -> np.ndarray:
        random = np.random.default_rng(tokens[-self.memory :].tolist())
        own = random.random() < self.agreement
        return random.normal(0, 3, VOCAB) if own else np.random.default_rng(len(tokens)).normal(0, 3, VOCAB)


@dataclass(frozen=True)
class Toy:
    """An engine over toys."""

    engine: Engine
    cache: Cache
    target: ToyNetwork


def toy_engine(
    make_drafters: Callable[[Cache], list[Drafter]] = lambda cache: [],
    *,
    n_slots: int = 2,
    n_pages: int = 64,
    batch_size: int = 16,
    shared_size: int | None = None,
    adaptive: bool = False,
    eos: int = VOCAB,
    acceptance: Acceptance = coupled,
    overlaps: bool = False,
    memory: int = 1 << 20,
    now: WoundClock | None = None,
    waiting: Waiting | None = None,
) -> Toy:
    """A toy engine with 4-token pages; `eos` past the vocabulary never ends a text.

    now: its clock; None: one by which all work takes as long.
    """
    select(CPU, torch.float32)
    target = ToyNetwork(memory=memory)
    sizes = Sizes(n_slots=n_slots, n_pages=n_pages, page_size=4)
    stores = {name: Store([KV(1, 1)], sizes, torch.float32, CPU) for name in ("target", "draft")}
    cache = Cache(stores, n_slots, n_pages, 4)
    capacity = Capacity(
        n_slots=n_slots,
        n_ctx=256,
        batch_size=batch_size,
        eos_ids=frozenset({eos}),
        shared_size=shared_size,
        overlaps=overlaps,
    )
    chain = Chain(make_drafters(cache), Lengths(adaptive=adaptive), now=now or WoundClock(tick=1e-4))
    engine = Engine(target, cache, chain, capacity, acceptance, waiting)  # type: ignore[arg-type]
    return Toy(engine, cache, target)


def toy_slot(
    name: str,
    prompt: list[int],
    *,
    slot_id: int = 0,
    types: tuple[str, ...] = (),
    n_max: int = 4,
    max_tokens: int = 20,
    stop: str | None = None,
    temperature: float = 0.8,
    owner: str = "",
    wanted: int | None = None,
    min_tokens: int = 0,
    steps: bool = False,
    emitted: tuple[int, ...] = (),
    tenant: str = "",
) -> Slot:
    """A slot as the service makes it.

    slot_id: its number where no engine gives it one; wanted: the only one that an engine may give it.
    """
    request = Request(
        id=name,
        prompt=tuple(prompt),
        sampling=Sampling(temperature=temperature, seed=3),
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        owner=owner,
        slot=wanted,
        steps=steps,
        emitted=emitted,
        tenant=tenant,
    )
    factory = SlotFactory(Settings(draft_max=n_max), types, 10**6, VOCAB, frozenset())
    slot = factory.resolve(request, Prepared(prompt, Words(stop)))  # type: ignore[arg-type]
    slot.id = slot_id
    return slot
