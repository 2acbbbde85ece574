"""`verify`: the definition in words, the reference, and the CUDA kernel in the emulator."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from slipstream import kernels
from slipstream.kernels.verify import cuda, reference
from slipstream.kernels.verify.op import verify
from tests.emulator import emulated, needs_compiler

pytestmark = pytest.mark.sampled

ORDERS = (0, 1, 7)
Verify = Callable[..., tuple[Tensor, Tensor]]


class Case:
    """Spans of the texts of a few slots. None as a span: one without rows; a slot of -1: padding."""

    def __init__(
        self, spans: list[tuple[int, list[int], list[int]] | None], n_slots: int, capacity: int
    ) -> None:
        self.spans = spans  # (slot, drafts, picks)
        random = torch.Generator().manual_seed(capacity)
        self.tokens = torch.randint(90, 99, (n_slots, capacity), generator=random, dtype=torch.int32)
        self.lengths = torch.randint(
            0, max(1, capacity // 2), (n_slots,), generator=random, dtype=torch.int32
        )

    def run(self, verify: Verify) -> tuple[list[int], list[int], list[list[int]], list[int]]:
        """n_accepted, next tokens, tokens and lengths after it."""
        picks = [pick for span in self.spans if span for pick in span[2]]
        drafts = [draft for span in self.spans if span for draft in span[1]]
        counts = torch.tensor([0] + [len(span[2]) if span else 0 for span in self.spans])
        slots = [span[0] if span else 0 for span in self.spans]
        tokens, lengths = self.tokens.clone(), self.lengths.clone()
        n_accepted, next_ids = verify(
            torch.tensor(picks, dtype=torch.int64),
            torch.tensor(drafts, dtype=torch.int64),
            counts.cumsum(0).to(torch.int32),
            torch.tensor(slots, dtype=torch.int64),
            tokens,
            lengths,
        )
        assert (n_accepted.dtype, next_ids.dtype) == (torch.int32, torch.int64)
        return n_accepted.tolist(), next_ids.tolist(), tokens.tolist(), lengths.tolist()

    def meant(self) -> tuple[list[int], list[int], list[list[int]], list[int]]:
        """The same by the words of the definition, on lists that grow."""
        n_accepted, next_ids = [], []
        capacity = self.tokens.shape[1]
        texts = [
            row[:length] for row, length in zip(self.tokens.tolist(), self.lengths.tolist(), strict=True)
        ]
        for span in self.spans:
            if span is None or span[0] < 0:
                n_accepted.append(0)
                next_ids.append(-1)
                continue
            slot, drafts, picks = span
            agree = [draft == pick and draft >= 0 for draft, pick in zip(drafts, picks, strict=False)]
            n = [*agree, False].index(False)
            n_accepted.append(n)
            next_ids.append(picks[n])
            texts[slot] += drafts[:n] + [picks[n]] * (picks[n] >= 0)
        after = [
            text[:capacity] + before[len(text) :]
            for text, before in zip(texts, self.tokens.tolist(), strict=True)
        ]
        return n_accepted, next_ids, after, [len(text) for text in texts]


def random_case(seed: int) -> Case:
    """Up to 40 spans of up to 70 rows over a random order of slots; NaN rows, padding, spans without rows."""
    random = torch.Generator().manual_seed(seed)

    def number(most: int) -> int:
        return int(torch.randint(most + 1, (), generator=random))

    n_slots = number(39) + 1
    spans: list[tuple[int, list[int], list[int]] | None] = []
    for slot in torch.randperm(n_slots, generator=random).tolist():
        if number(7) == 0:
            spans.append(None)
            continue
        picks = [number(5) for _ in range(number(70 if slot % 5 == 0 else 8) + 1)]
        drafts = picks[:-1]
        if drafts and number(2):
            drafts[number(len(drafts) - 1)] = number(6) - 1
        if number(4) == 0:
            picks[number(len(picks) - 1)] = -1
        spans.append((slot if number(9) else -1, drafts, picks))
    return Case(spans, n_slots, 40 + number(200))


def on_device(order: int) -> Verify:
    def run(*arguments: Tensor) -> tuple[Tensor, Tensor]:
        with emulated(order=order):
            return cuda.verify(*arguments)

    return run


VERIFIERS = [
    pytest.param(reference.verify, id="reference"),
    *(pytest.param(on_device(order), id=f"cuda-{order}", marks=needs_compiler) for order in ORDERS),
]
EVERYWHERE = pytest.mark.parametrize("run", VERIFIERS)


@EVERYWHERE
@pytest.mark.parametrize("seed", range(30))
def test_random_spans(seed: int, run: Verify) -> None:
    case = random_case(seed)
    assert case.run(run) == case.meant()


@EVERYWHERE
def test_each_case_by_hand(run: Verify) -> None:
    case = Case(
        [
            (3, [5, 6, 7], [5, 6, 7, 8]),  # all accepted
            (0, [5, 6, 7], [5, 9, 7, 8]),  # refuted at the second; a later match means nothing
            (1, [], [4]),  # plain decoding
            None,
            (2, [5, 6], [-1, 6, 7]),  # NaN at the first row
            (4, [5, 6], [5, -1, 7]),  # NaN behind an accepted draft
            (-1, [5], [5, 6]),  # padding with rows
            (5, [-1, -1], [-1, 3, 3]),  # padded drafts never match, not even a row with NaN
            (6, [3, -1], [3, 2, 1]),
        ],
        7,
        40,
    )
    before = case.lengths.tolist()
    n_accepted, next_ids, tokens, lengths = case.run(run)
    assert n_accepted == [3, 1, 0, 0, 0, 1, 0, 0, 1]
    assert next_ids == [8, 9, 4, -1, -1, -1, -1, -1, 2]
    grown = [after - length for after, length in zip(lengths, before, strict=True)]
    assert grown == [2, 1, 0, 4, 1, 0, 2]
    assert tokens[3][before[3] : lengths[3]] == [5, 6, 7, 8]
    assert tokens[4][before[4] : lengths[4]] == [5]
    assert case.meant() == (n_accepted, next_ids, tokens, lengths)


@EVERYWHERE
def test_a_text_that_is_full_is_counted_on_but_not_written_on(run: Verify) -> None:
    case = Case([(1, [1, 2, 3], [1, 2, 3, 4]), (0, [1, 2], [1, 2, 3]), (2, [1], [1, 2])], 3, 10)
    case.lengths[:] = torch.tensor([10, 8, 13])
    n_accepted, _, tokens, lengths = case.run(run)
    assert n_accepted == [3, 2, 1]
    assert lengths == [13, 12, 15]
    assert tokens[1][8:] == [1, 2]
    assert tokens[0] == case.tokens[0].tolist()
    assert tokens[2] == case.tokens[2].tolist()


@EVERYWHERE
def test_no_spans(run: Verify) -> None:
    assert Case([], 1, 10).run(run)[:2] == ([], [])


@needs_compiler
def test_a_span_does_not_depend_on_its_company() -> None:
    case = random_case(12)
    whole = case.run(on_device(0))
    for i, span in enumerate(case.spans):
        alone = Case([span], len(case.tokens), case.tokens.shape[1])
        n_accepted, next_ids, tokens, lengths = alone.run(on_device(0))
        assert (n_accepted[0], next_ids[0]) == (whole[0][i], whole[1][i])
        if span and span[0] >= 0:
            assert (tokens[span[0]], lengths[span[0]]) == (whole[2][span[0]], whole[3][span[0]])


def test_the_op_runs_on_what_select_found() -> None:
    table = kernels.select("cpu", torch.float32)
    assert [line.implementation for line in table if line.op == "verify"] == ["reference"]
    case = random_case(1)
    assert case.run(verify) == case.meant()


def test_tensors_that_would_be_read_as_other_bits_are_refused() -> None:
    picks, starts = torch.zeros(2, dtype=torch.int64), torch.tensor([0, 2], dtype=torch.int32)
    slots, tokens, lengths = (
        picks[:1],
        torch.zeros(1, 8, dtype=torch.int32),
        torch.zeros(1, dtype=torch.int32),
    )
    with pytest.raises(ValueError, match="int64"):
        cuda.verify(picks, picks[:1].int(), starts, slots, tokens, lengths)
    with pytest.raises(ValueError, match="int32"):
        cuda.verify(picks, picks[:1], starts.long(), slots, tokens, lengths)
    with pytest.raises(ValueError, match="contiguous"):
        cuda.verify(picks, picks[:1], starts, slots, tokens[:, ::2], lengths)
    with pytest.raises(ValueError, match="span_starts"):
        cuda.verify(picks, picks[:1], starts[:1], slots, tokens, lengths)
