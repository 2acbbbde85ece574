"""From rows of sequences to what `choose` is told: biases, penalties, windows, bans and masks, in one copy."""

from __future__ import annotations

import math
import random
from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from slipstream.engine.api import Sampling
from slipstream.engine.sample import pick as picking
from slipstream.engine.sample.params import resolve_sampling
from slipstream.engine.sample.pick import Row, pick, row_params
from slipstream.kernels import select
from slipstream.kernels.choose.op import choose

VOCAB = 60
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _selected() -> None:
    select(CPU, torch.float32)


def a_row(dice: random.Random) -> Row:
    """A row of a short text of few words, with anything that may change its logits; some ids have no logit."""
    chances: dict[str, Any] = {
        "logit_bias": {dice.choice([3, 5, 7, 17, 50]): dice.choice([-math.inf, -3.0, 2.5]) for _ in range(4)},
        "repeat_penalty": dice.choice([0.7, 1.3]),
        "repeat_last_n": dice.choice([0, 1, 4, 64]),
        "presence_penalty": dice.choice([-0.7, 1.1]),
        "frequency_penalty": dice.choice([-0.3, 0.1]),
        "ignore_eos": True,
    }
    asked = {name: value for name, value in chances.items() if dice.random() < 0.4}
    sampling = Sampling(temperature=dice.choice([0.0, 0.8]), seed=dice.randrange(2**63), **asked)
    params = resolve_sampling(sampling, {}, [3, 5], VOCAB)
    if dice.random() < 0.3:
        params = replace(params, n_min=dice.choice([1, 9, 30]), end_ids=(5, 7))
    if dice.random() < 0.3:
        params = replace(params, bad_words=[(4, 5), (5, 17), (dice.randrange(9), 17, 4)])
    if dice.random() < 0.3:
        params = replace(params, allowed=np.array([dice.getrandbits(32) - 2**31 for _ in range(2)], np.int32))
    tokens = [dice.randrange(VOCAB + 3) % dice.choice([9, 99]) for _ in range(dice.choice([3, 40]))]
    n_prompt = dice.randint(1, len(tokens))
    counts = Counter(tokens[n_prompt:]) if params.counts_output else Counter[int]()
    if counts:
        counts[17] += 0  # as a cut sequence leaves it behind
    drafts = [dice.choice([4, 5, 17, VOCAB + 1]) for _ in range(dice.choice([0, 0, 1, 6]))]
    words = np.array([dice.getrandbits(32) - 2**31 for _ in range(dice.choice([2, 3]))], np.int32)
    return Row(params, tokens, n_prompt, counts, drafts, words if dice.random() < 0.3 else None)


def changed(row: Row, logits: Tensor) -> Tensor:
    """One row's logits by words of the definition, token by token. logits: [vocab] float32."""
    params, found = row.params, logits.numpy().copy()
    text = [*row.tokens, *row.drafts]
    output, recent = text[row.n_prompt :], text[max(0, len(text) - params.repeat_last_n) :]
    for token in range(len(found)):
        logit = found[token] + np.float32(params.bias.get(token, 0.0))
        if len(output) < params.n_min and token in params.end_ids:
            logit = np.float32(-np.inf)
        if any((*output, token)[-len(word) :] == word for word in params.bad_words):
            logit = np.float32(-np.inf)
        if token in recent:
            repeat = np.float32(params.repeat_penalty)
            logit = logit / repeat if logit > 0 else logit * repeat
        n = output.count(token)
        told = np.float32(params.presence_penalty) * np.float32(n > 0)
        found[token] = logit - (told + np.float32(params.frequency_penalty) * np.float32(n))
        for mask in (row.allowed, params.allowed):
            if mask is not None and not int(mask[token // 32]) >> (token % 32) & 1:
                found[token] = -np.inf
    return torch.from_numpy(found)


@pytest.mark.parametrize("seed", range(60))
def test_rows_are_picked_from_by_words_of_the_definition(seed: int) -> None:
    dice = random.Random(seed)
    rows = [a_row(dice) for _ in range(dice.choice([1, 2, 9]))]
    logits = torch.randn(len(rows), VOCAB, generator=torch.Generator().manual_seed(seed)) * 2
    before = logits.clone()
    meant = torch.stack([changed(row, one) for row, one in zip(rows, logits, strict=True)])
    params = row_params(rows, CPU)
    for given in (None, params):
        got = pick(logits, rows, params=given, want_probability=True)
        plain = choose(meant, params, want_probability=True)
        assert got.token_ids.tolist() == plain.token_ids.tolist()
        assert got.probability is not None
        assert plain.probability is not None
        assert torch.equal(got.probability, plain.probability)
    assert torch.equal(logits, before)


def test_drafts_count_as_if_they_had_been_accepted() -> None:
    """In the window, in the output, and towards the least length."""
    for asked in ({"repeat_penalty": 9.0}, {"presence_penalty": 2.0}, {"frequency_penalty": 2.0}):
        params = resolve_sampling(Sampling(temperature=0.0, **asked), {}, [], VOCAB)
        logits = torch.zeros(1, VOCAB)
        logits[0, 20:23] = torch.tensor([1.5, 1.0, 0.5])
        for n in range(3):
            row = Row(params, [1, 2], 1, Counter([2]), [20, 21, 22][:n])
            assert int(pick(logits, [row]).token_ids[0]) == 20 + n
    params = replace(resolve_sampling(Sampling(temperature=0.0), {}, [], VOCAB), n_min=3, end_ids=(20,))
    for n, picked in ((0, 21), (1, 21), (2, 20)):
        row = Row(params, [1, 2], 1, Counter(), [6, 8][:n])
        assert int(pick(logits, [row]).token_ids[0]) == picked


def test_all_that_a_pick_needs_goes_to_the_device_in_one_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    copies: list[int] = []
    upload = picking.upload

    def counted(arrays: Any, device: torch.device) -> list[Tensor]:
        copies.append(len(arrays))
        return upload(arrays, device)

    monkeypatch.setattr(picking, "upload", counted)
    plain = Row(resolve_sampling(Sampling(seed=1), {}, [], VOCAB), [1], 1, Counter())
    penalised = replace(plain, params=resolve_sampling(Sampling(repeat_penalty=1.5), {}, [], VOCAB))
    ruled = replace(plain, allowed=np.full(2, -1, np.int32))
    spent = replace(plain, params=replace(plain.params, n_min=0, end_ids=(4,), bias={}))
    logits = torch.zeros(4, VOCAB)
    rows = [plain, penalised, ruled, spent]
    pick(logits, rows)
    assert copies == [6 + 5 + 2]
    copies.clear()
    pick(logits[:1], [plain], params=row_params([plain], CPU))
    assert copies == [6], "of the parameters alone, when they were made"
