"""Plays draft heads as a drafter would, ragged, with rejections, and compares every row with a formula."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from slipstream.engine.batch import Batch, Span
from slipstream.engine.cache.kv import KV
from slipstream.engine.cache.need import Sizes
from slipstream.engine.cache.store import Store
from slipstream.engine.layers.decoder import Taps
from slipstream.engine.models.heads.block_backbone import BlockDraft
from slipstream.engine.models.heads.dspark import DSpark
from slipstream.engine.models.heads.eagle3 import Eagle3
from slipstream.engine.models.heads.mtp import Mtp
from slipstream.engine.models.network import Network
from slipstream.engine.speculate.network.draft_hidden import Module

CPU = torch.device("cpu")
N_CTX, PAGE, N_PAGES, N_SLOTS, VOCAB = 128, 16, 48, 4, 384
N_TEXT = 70
TOLERANCE = 1e-5


class Pages:
    """A store of one network and page tables of shuffled pages."""

    def __init__(self, layers: list[KV], dtype: torch.dtype = torch.float32, seed: int = 0) -> None:
        sizes = Sizes(n_slots=1, n_pages=N_PAGES, page_size=PAGE, n_window_pages=N_PAGES)
        self.store = Store(layers, sizes, dtype, CPU)
        for tensor in (t for layer in self.store.layers for t in layer.of_pages()):
            tensor.fill_(7.0)  # what nobody wrote must not be read
        pages = list(range(N_PAGES))
        random.Random(seed).shuffle(pages)
        self.tables = [pages[i : i + N_CTX // PAGE] for i in range(0, N_SLOTS * N_CTX // PAGE, N_CTX // PAGE)]

    def batch(self, *spans: Span) -> Batch:
        tables = [self.tables[span.slot] for span in spans]
        batch = Batch.build(spans, tables, PAGE, CPU)
        if self.store.windows is None:
            return batch
        return replace(batch, window=batch.on_pages(tables, PAGE))  # all of a text is kept

    def run(self, module: Module, hidden: Tensor, *spans: Span) -> tuple[Tensor, Tensor]:
        """A head's module over the spans: [n_logits, vocab] float32 and recurrence [n_logits, d_model]."""
        said, recurrence = module.run(self.batch(*spans), hidden, self.store)
        return module.logits(said), recurrence


def text(seed: int, n: int = N_TEXT + 1) -> list[int]:
    return torch.randint(VOCAB, (n,), generator=torch.Generator().manual_seed(seed)).tolist()


def streams_of(target: Network, ids: Sequence[int], taps: Sequence[int]) -> list[Tensor]:
    """The target's streams at all positions of a text, [n, d_model] each."""
    pages, asked = Pages(target.needs, target.dtype), Taps(taps)
    target.forward(pages.batch(Span(0, list(ids), 0, 0, 0)), pages.store, asked)
    return asked.of(taps)


def worst(ours: Tensor, expected: Tensor) -> float:
    """The largest difference; infinite where only one is minus infinity."""
    assert ours.shape == expected.shape
    assert torch.equal(ours.isinf(), expected.isinf())
    known = ~expected.isinf()
    return float((ours[known] - expected[known]).abs().max())


Reference = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]  # embedded, hidden -> logits, recurrence


@dataclass
class Lane:
    """One slot's text with the target's true features, fused, and how far the head has been fed."""

    slot: int
    ids: list[int]
    fused: Tensor  # [n, d_model]
    fed: int = 0


class Rounds:
    """Feeds a recurrent head as a drafter would and compares every row with the formula on the whole text."""

    def __init__(self, head: Eagle3 | Mtp, embedding: Tensor, reference: Reference) -> None:
        self.head, self.embedding, self.reference = head, embedding, reference
        self.pages = Pages(head.needs)
        self.worst = 0.0
        self.n_rows = 0

    def feed(self, lanes: Sequence[Lane], sizes: Sequence[int], n_logits: Sequence[int]) -> list[Tensor]:
        """Feed true features, the next `sizes` positions of each lane. Returns each lane's last recurrence."""
        spans, parts = [], []
        for lane, size, n in zip(lanes, sizes, n_logits, strict=True):
            tokens = lane.ids[lane.fed + 1 : lane.fed + 1 + size]
            spans.append(Span(lane.slot, tokens, lane.fed, 0, n))
            parts.append(lane.fused[lane.fed : lane.fed + size])
            lane.fed += size
        logits, recurrence = self.run(spans, torch.cat(parts))
        lasts = []
        for lane, n in zip(lanes, n_logits, strict=True):
            tokens, hidden = lane.ids[1 : lane.fed + 1], lane.fused[: lane.fed]
            self.compare(logits[:n], recurrence[:n], tokens, hidden)
            lasts.append(recurrence[n - 1 : n])
            logits, recurrence = logits[n:], recurrence[n:]
        return lasts

    def draft(self, lanes: Sequence[Lane], lasts: list[Tensor], guesses: Sequence[Sequence[int]]) -> None:
        """Run the head on its own recurrences over guessed tokens, all lanes in each pass."""
        own = [[last] for last in lasts]
        for step in range(len(guesses[0])):
            tokens = [guess[step] for guess in guesses]
            spans = [
                Span(lane.slot, [token], lane.fed + step, 1, 1)
                for lane, token in zip(lanes, tokens, strict=True)
            ]
            logits, recurrence = self.run(spans, torch.cat([states[-1] for states in own]))
            for row, (lane, states) in enumerate(zip(lanes, own, strict=True)):
                ids = [*lane.ids[1 : lane.fed + 1], *guesses[row][: step + 1]]
                self.compare(
                    logits[row : row + 1],
                    recurrence[row : row + 1],
                    ids,
                    torch.cat((lane.fused[: lane.fed], *states)),
                )
                states.append(recurrence[row : row + 1])

    def run(self, spans: Sequence[Span], hidden: Tensor) -> tuple[Tensor, Tensor]:
        with torch.inference_mode():
            logits, recurrence = self.pages.run(self.head.modules[0], hidden, *spans)
        assert logits.dtype == torch.float32
        assert logits.shape == (recurrence.shape[0], VOCAB)
        assert recurrence.shape[1] == self.head.d_model
        return logits, recurrence

    def compare(self, logits: Tensor, recurrence: Tensor, ids: Sequence[int], hidden: Tensor) -> None:
        if len(logits):
            expected, states = self.reference(self.embedding[torch.tensor(ids)], hidden)
            expected, states = expected[-len(logits) :], states[-len(logits) :]
            self.worst = max(self.worst, worst(logits, expected), worst(recurrence, states))
            self.n_rows += len(logits)
            assert expected[~expected.isinf()].std() > 0.3, "logits must be large enough to show a difference"


def play(rounds: Rounds, lanes: Sequence[Lane]) -> float:
    """Prompts in ragged chunks, then rounds of drafts of which 0 to 4 are accepted. Returns the worst difference."""
    rng = random.Random(5)
    first, second, third = lanes
    rounds.feed([first, second], [17, 3], [0, 2])
    rounds.feed([second, third, first], [30, 1, 3], [4, 1, 0])
    lasts = rounds.feed([third, first, second], [22, 2, 1], [1, 2, 1])
    order = [third, first, second]
    while order[0].fed < 50:
        rounds.draft(order, lasts, [[rng.randrange(VOCAB) for _ in range(4)] for _ in order])
        sizes = [rng.randint(1, 5) for _ in order]  # one certain token and the accepted drafts
        lasts = rounds.feed(order, sizes, [min(size, 2) for size in sizes])
    assert rounds.n_rows > 60
    return rounds.worst


def lanes_of(head: Eagle3 | Mtp, target: Network) -> list[Lane]:
    """Three texts with the features that the head reads."""
    texts = {slot: text(10 + slot) for slot in (2, 0, 3)}
    with torch.inference_mode():
        return [
            Lane(slot, ids, head.fuse(streams_of(target, ids[:-1], head.taps))) for slot, ids in texts.items()
        ]


def play_blocks(
    head: BlockDraft | DSpark,
    target: Network,
    expected: Callable[[Sequence[Tensor], int], Tensor],
    n_wanted: int,
) -> float:
    """Rounds of ragged injections and blocks of three slots at once. Returns the worst difference.

    expected(streams of the context, anchor) -> logits of all rows of the block.
    """
    rng, pages, largest = random.Random(6), Pages(head.needs), 0.0
    texts = {slot: text(20 + slot) for slot in (3, 0, 1)}
    streams = {slot: streams_of(target, ids, head.taps) for slot, ids in texts.items()}
    n_past = dict.fromkeys(texts, 0)
    for sizes in [(17, 3, 9), (20, 1, 8), (1, 30, 2), (6, 5, 4), (2, 1, 6), (3, 6, 1)]:
        spans, parts = [], []
        for slot, size in zip(texts, sizes, strict=True):
            spans.append(Span(slot, texts[slot][n_past[slot] : n_past[slot] + size], n_past[slot], 0, 0))
            parts.append([stream[n_past[slot] : n_past[slot] + size] for stream in streams[slot]])
            n_past[slot] += size
        features = [torch.cat(rows) for rows in zip(*parts, strict=True)]
        drafting = rng.sample(list(texts), rng.randint(1, 3))
        blocks = [block_at(head, slot, texts[slot], n_past[slot], n_wanted) for slot in drafting]
        with torch.inference_mode():
            head.inject(pages.batch(*spans), features, pages.store)
            logits = head.run(pages.batch(*blocks), pages.store)[0]
        assert logits.dtype == torch.float32
        for slot, ours in zip(drafting, logits.split(n_wanted), strict=True):
            context = [stream[: n_past[slot]] for stream in streams[slot]]
            theirs = expected(context, texts[slot][n_past[slot]])[-n_wanted:]
            assert theirs.std() > 0.3, "logits must be large enough to show a difference"
            largest = max(largest, worst(ours, theirs))
    return largest


def block_at(head: BlockDraft | DSpark, slot: int, ids: Sequence[int], n_past: int, n_wanted: int) -> Span:
    """A block of which the text's token at n_past is the anchor."""
    n_masks = head.block_size - 1
    return Span(slot, [ids[n_past], *[head.mask_id] * n_masks], n_past, n_masks, n_wanted)
