"""A bench for losslessness: engines built by hand over one checkpoint pair, and requests played through them.

Requests arrive at random, some are cancelled and sent again, slots are preempted when pages run out, and prompts
share prefixes, and each request narrows speculation as it likes. Whatever
happens, a request's tokens must be those of plain decoding alone in one slot.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from slipstream.engine.api import Delta, Done, Echo, Event, Failed, Request, Sampling, Speculate, TokenLogprob
from slipstream.engine.cache.cache import Cache
from slipstream.engine.cache.need import Sizes
from slipstream.engine.cache.snapshots import Snapshots
from slipstream.engine.cache.store import Store
from slipstream.engine.core.engine import Engine
from slipstream.engine.core.plan import Capacity
from slipstream.engine.core.slot_factory import Prepared, SlotFactory
from slipstream.engine.errors import InvalidRequest
from slipstream.engine.frames import frame_sizes
from slipstream.engine.images import PlacedImage
from slipstream.engine.models.captured import Capture, Capturing, cpu_capture, cuda_capture
from slipstream.engine.models.network import Network
from slipstream.engine.models.reading.documents import text_source
from slipstream.engine.models.registry import load_network
from slipstream.engine.service.run.preparing import bad_word_ids
from slipstream.engine.settings import Settings
from slipstream.engine.slot import Slot
from slipstream.engine.speculate.chain import Chain
from slipstream.engine.speculate.decide.value import Lengths
from slipstream.engine.speculate.drafter import Drafter
from slipstream.engine.speculate.registry import BY_NAME, Parts
from slipstream.engine.stats import EngineStats
from slipstream.engine.text.grammar.grammars import Grammars
from slipstream.engine.text.text_stream import TextStream
from slipstream.engine.text.thinking import CutThinking, cut_of
from slipstream.engine.text.tokenizer import Tokenizer
from slipstream.kernels import select
from tests.oracle.draft_heads import load_head
from tests.oracle.scripted import Scripted
from tests.recording import record
from tests.wound_clock import WoundClock

EIGHT = Speculate(n_max=8)
ASKS = Request(id="", prompt="")
ROOT = Path(__file__).parents[2]
HEADS = ("draft-eagle3", "draft-mtp", "draft-dflash", "draft-dspark")  # of the demo


@dataclass(frozen=True, slots=True)
class Folders:
    """Where a target and what drafts for it lie."""

    target: Path
    draft: Path | None = None  # None: no draft model
    heads: Mapping[str, Path] = field(default_factory=dict)  # by drafter


DEMO = Folders(
    ROOT / "demo" / "target",
    ROOT / "demo" / "draft",
    {name: ROOT / "demo" / name.removeprefix("draft-") for name in HEADS},
)


@dataclass(frozen=True, slots=True)
class Case:
    """One request of the suite."""

    prompt: tuple[int, ...]
    sampling: Sampling
    speculate: Speculate = EIGHT
    max_tokens: int = 48
    n_edits: int | None = None  # tokens changed in the prediction the request brings; None: it brings none
    asks: Request = ASKS  # what else it wants: a grammar, log-probabilities, …
    images: Sequence[PlacedImage] = ()  # in its prompt
    draft_images: Sequence[PlacedImage] = ()  # the same, as the draft model sees them


@dataclass(frozen=True, slots=True)
class Bench:
    """How an engine is built: drafters, slots, pages."""

    types: tuple[str, ...] = ()
    n_slots: int = 1
    n_pages: int = 512
    page_size: int = 16
    batch_size: int = 64
    adaptive: bool = True
    by_value: bool = True
    shares: bool = False  # finished outputs are drafted from
    n_parked: int = 64  # rows of drafts that recurrent layers can keep
    n_window_pages: int = 128  # of layers with a window, in each store
    snapshot_bytes: int = 2**26
    draft_max: int = 24
    draft_context: int = 512
    captured: bool = False  # passes are captured and replayed, in frames of a GPU's sizes
    recorded: bool = False  # the same in exact frames, as on the CPU
    overlaps: bool = False  # passes are launched before the one before has been read
    # All work takes as long, so that what is drafted does not hang on the machine.
    now: Callable[[], float] = field(default_factory=lambda: WoundClock(tick=1e-4))

    @property
    def settings(self) -> Settings:
        """The settings of a server built so, with n-grams short enough to be found in short texts."""
        return Settings(
            parallel=self.n_slots,
            draft_max=self.draft_max,
            draft_context=self.draft_context,
            spec_shared_history="all" if self.shares else "off",
            spec_shared_history_size=4096,
            spec_ngram_simple_size_n=3,
            spec_ngram_simple_size_m=16,
            spec_ngram_map_k_size_n=3,
            spec_ngram_map_k_size_m=16,
            spec_ngram_map_k4v_size_n=2,
            spec_ngram_map_k4v_size_m=8,
            spec_ngram_map_k4v_min_hits=2,
            spec_ngram_mod_n_match=4,
            spec_ngram_mod_n_min=2,
            spec_ngram_mod_n_max=16,
        )


@dataclass(slots=True)
class Played:
    """What came out of a run."""

    tokens: dict[int, list[int]] = field(default_factory=dict)  # per case, of the attempt that finished
    logprobs: dict[int, list[TokenLogprob]] = field(
        default_factory=dict
    )  # of the same, where they are asked for
    echoes: dict[int, Echo] = field(default_factory=dict)
    partial: list[tuple[int, list[int]]] = field(default_factory=list)  # of cancelled attempts
    done: dict[int, Done] = field(default_factory=dict)
    failed: dict[int, Failed] = field(default_factory=dict)
    stats: EngineStats | None = None
    engine: Engine | None = None
    n_cached: int = 0
    n_restored: int = 0  # tokens of slots that were saved, erased and restored


class Lab:
    """A target and its drafts in one dtype, loaded once."""

    def __init__(self, folders: Folders, dtype: torch.dtype, n_ctx: int = 1024, device: str = "cpu") -> None:
        where = torch.device(device)
        for one in dict.fromkeys((torch.float32, dtype)):  # routers of some experts multiply in float32
            select(where, one)
        self.folders = folders
        self.tokenizer = Tokenizer(text_source(folders.target))
        self.n_ctx = n_ctx
        self.target = self._load_target(folders.target, dtype, where)
        self.grammars = Grammars(self.tokenizer, self.target.vocab_size)
        self.draft = None
        if folders.draft is not None:
            self.draft = load_network(folders.draft, dtype, where, n_ctx + 64, self.tokenizer.vocab_size)
        self._heads: dict[str, Any] = {}

    def _load_target(self, folder: Path, dtype: torch.dtype, where: torch.device) -> Network:
        return load_network(folder, dtype, where, self.n_ctx, self.tokenizer.vocab_size)

    def _store(self, network: Any, sizes: Sizes) -> Store:
        return Store(network.needs, sizes, self.target.dtype, self.target.device)

    @property
    def capture(self) -> Capture:
        """How passes are captured on the lab's device."""
        return cuda_capture(self.target.device) if self.target.device.type == "cuda" else record

    def head(self, name: str) -> Any:
        """The head for a drafter, loaded once."""
        if name not in self._heads:
            self._heads[name] = load_head(name, self.folders.heads[name], self.target, self.n_ctx + 64)
        return self._heads[name]

    def engine(self, bench: Bench, future: Callable[[Slot], Sequence[int]] | None = None) -> Engine:
        """A cold engine. `future` is what the scripted drafter knows."""
        heads = {name: self.head(name) for name in bench.types if name in self.folders.heads}
        networks = {"target": self.target, "draft": self.draft, **heads}
        sizes = Sizes(
            n_slots=bench.n_slots,
            n_pages=bench.n_pages,
            page_size=bench.page_size,
            n_parked=bench.n_parked,
            n_window_pages=bench.n_window_pages,
        )
        stores = {
            name: self._store(network, sizes) for name, network in networks.items() if network is not None
        }
        cache = Cache(stores, bench.n_slots, bench.n_pages, bench.page_size, Snapshots(bench.snapshot_bytes))
        eos_ids, vocab_size = self.tokenizer.eos_ids, self.target.vocab_size
        parts = Parts(
            bench.settings,
            networks,
            cache,
            bench.batch_size,
            vocab_size,
            eos_ids,
            self.n_ctx,
            self.target.device,
        )
        drafters = [self._drafter(name, parts, future) for name in bench.types]
        chain = Chain(drafters, Lengths(adaptive=bench.adaptive), by_value=bench.by_value, now=bench.now)
        capacity = Capacity(
            n_slots=bench.n_slots,
            n_ctx=self.n_ctx,
            batch_size=bench.batch_size,
            eos_ids=self.tokenizer.eos_ids,
            overlaps=bench.overlaps,
        )
        engine = Engine(self.target, cache, chain, capacity)
        if bench.captured or bench.recorded:
            n_pages = -(-(self.n_ctx + bench.draft_max) // bench.page_size) + 1
            target = self.target
            stream = torch.zeros(1, target.config.d_model, dtype=target.dtype, device=target.device)
            capture, sizes = (
                (cpu_capture(), None)
                if bench.recorded
                else (self.capture, frame_sizes(bench.n_slots, bench.draft_max, bench.batch_size))
            )
            engine.capture(Capturing(capture, sizes, n_pages, bench.draft_max, stream))
        return engine

    def _drafter(self, name: str, parts: Parts, future: Callable[[Slot], Sequence[int]] | None) -> Drafter:
        if name == Scripted.name:
            return Scripted(future or (lambda slot: ()), 0.8, parts.vocab_size)
        return BY_NAME[name].build(parts)

    def slot(self, request_id: str, case: Case, bench: Bench, prediction: Sequence[int] = ()) -> Slot:
        """The slot the service would make for this case."""
        request = replace(
            case.asks,
            id=request_id,
            prompt=case.prompt,
            sampling=case.sampling,
            speculate=case.speculate,
            max_tokens=case.max_tokens,
        )
        rules = request.grammar and self.grammars.constraint(request.grammar, "", "").result()
        budget = request.thinking_budget
        cut = None if budget is None else cut_of(budget, "", self.tokenizer)
        n_words = -(-self.target.vocab_size // 32)
        prepared = Prepared(
            case.prompt,
            TextStream(
                self.tokenizer,
                case.prompt,
                request.stop,
                skip_special=request.skip_special,
                with_places=request.logprobs is not None,
                includes_stop=request.include_stop,
            ),
            tuple(prediction) if bench.types else (),
            rules if cut is None else CutThinking(cut, rules, self.tokenizer.token_bytes, n_words),
            bad_words=bad_word_ids(self.tokenizer, request.sampling.bad_words),
            images=case.images,
            draft_images=case.draft_images,
        )
        eos_ids, vocab_size = self.tokenizer.eos_ids, self.target.vocab_size
        factory = SlotFactory(bench.settings, bench.types, self.n_ctx, vocab_size, eos_ids)
        return factory.resolve(request, prepared)


@dataclass(frozen=True, slots=True)
class Trouble:
    """What disturbs a run."""

    cancel_share: float = 0.0  # of the cases is cancelled once and sent again
    save_share: float = 0.0  # of the steps after which an idle slot is saved, erased and restored


CALM = Trouble()


def play(
    lab: Lab,
    bench: Bench,
    cases: Sequence[Case],
    *,
    seed: int = 0,
    trouble: Trouble = CALM,
    known: Mapping[int, Sequence[int]] | None = None,
) -> Played:
    """Run all cases through one engine, arriving at random.

    Where the text is `known`, the scripted drafter knows it too, and predictions are made of it.
    """
    return _Run(lab, bench, cases, np.random.default_rng(seed), known or {}).play(trouble)


class _Run:
    """Requests on their way through one engine; a request's id is "case#attempt"."""

    def __init__(
        self,
        lab: Lab,
        bench: Bench,
        cases: Sequence[Case],
        random: np.random.Generator,
        known: Mapping[int, Sequence[int]],
    ) -> None:
        self.lab, self.bench, self.cases, self.random, self.known = lab, bench, cases, random, known
        self.engine = lab.engine(bench, lambda slot: known[_case(slot.request.id)][slot.n_decoded :])
        self.played = Played()
        self.current: dict[str, list[int]] = {}
        self.told: dict[str, list[TokenLogprob]] = {}

    def play(self, trouble: Trouble) -> Played:
        random, engine = self.random, self.engine
        pending = list(random.permutation(len(self.cases)))
        doomed = {i: int(random.integers(1, 12)) for i in pending if random.random() < trouble.cancel_share}
        while pending or engine.busy:
            while pending and (not engine.busy or random.random() < 0.5):
                self.send(int(pending.pop()), 0)
            for request_id, event in engine.step():
                self.hear(request_id, event)
            self.cancel(doomed)
            if random.random() < trouble.save_share:
                self.move(int(random.integers(self.bench.n_slots)))
        self.played.stats, self.played.engine = engine.stats(), engine
        return self.played

    def send(self, index: int, attempt: int) -> None:
        request_id, case, prediction = f"{index}#{attempt}", self.cases[index], self.predicted(index)
        self.current[request_id], self.told[request_id] = [], []
        self.engine.add(self.lab.slot(request_id, case, self.bench, prediction))

    def predicted(self, index: int) -> list[int]:
        n_edits, tokens = self.cases[index].n_edits, list(self.known.get(index, ()))
        if n_edits is None or "prediction" not in self.bench.types or not tokens:
            return []
        for at in self.random.integers(0, len(tokens), n_edits):
            tokens[at] = int(self.random.integers(0, self.lab.target.vocab_size))
        return tokens

    def hear(self, request_id: str, event: Event) -> None:
        index, played = _case(request_id), self.played
        if isinstance(event, Delta):
            self.current[request_id].extend(event.token_ids)
            self.told[request_id].extend(event.logprobs)
        elif isinstance(event, Echo):
            assert index not in played.echoes or event == played.echoes[index]
            played.echoes[index] = event
        elif isinstance(event, Done):
            played.tokens[index] = self.current.pop(request_id)
            played.logprobs[index] = self.told.pop(request_id)
            played.done[index] = event
            played.n_cached += event.usage.n_cached
        else:
            self.current.pop(request_id)
            played.failed[index] = event

    def cancel(self, doomed: Mapping[int, int]) -> None:
        for request_id in [one for one in self.current if one.endswith("#0")]:
            index = _case(request_id)
            if len(self.current[request_id]) >= doomed.get(index, 1 << 30):
                self.engine.cancel(request_id)
                self.played.partial.append((index, self.current.pop(request_id)))
                self.send(index, 1)

    def move(self, slot_id: int) -> None:
        """Take what is cached of an idle slot's last sequence out of the cache, and put it back."""
        try:
            saved = self.engine.seats.remembered.save(slot_id, "")
            self.engine.seats.remembered.erase(slot_id, "")
            self.played.n_restored += self.engine.seats.remembered.restore(slot_id, saved, "")
        except InvalidRequest:
            return  # busy, or nothing of it is cached any more


def _case(request_id: str) -> int:
    return int(request_id.split("#")[0])


def draft_beside_trouble(lab: Lab, prompt: Sequence[int]) -> tuple[int, int]:
    """Requests over parts of a prompt have the tokens of plain decoding, through cancels and preemptions.

    The lab's draft network drafts. Returns how many tokens were drafted and accepted.
    """
    cases = [
        Case(tuple(prompt[: 20 + 9 * i]), Sampling(seed=i, temperature=0.7 * (i % 2)), max_tokens=32)
        for i in range(4)
    ]
    expected = play(lab, Bench(), cases).tokens
    bench = Bench(("draft-model", "suffix"), n_slots=3, n_pages=14, adaptive=False)
    played = play(lab, bench, cases, known=expected, trouble=Trouble(0.5))
    assert played.tokens == expected
    told = [one.speculation for one in played.done.values()]
    return sum(one.n_drafted for one in told), sum(one.n_accepted for one in told)


def differences(played: Played, expected: Played) -> tuple[int, int]:
    """(tokens compared, requests that differ anywhere: in tokens, in bits of a log-probability, in the echo)."""
    n_tokens = sum(len(tokens) for tokens in played.tokens.values())
    n_wrong = sum(
        (tokens, played.logprobs[i], played.echoes.get(i))
        != (expected.tokens[i], expected.logprobs[i], expected.echoes.get(i))
        for i, tokens in played.tokens.items()
    )
    for i, tokens in played.partial:
        n_tokens += len(tokens)
        n_wrong += tokens != expected.tokens[i][: len(tokens)]
    return n_tokens, n_wrong
