"""A slot's tokens as an array, which text drafters read: after each change it is the list."""

from __future__ import annotations

import numpy as np

from tests.unit.toy import toy_slot


def test_history_is_the_tokens_whatever_was_cut() -> None:
    slot = toy_slot("a", [1, 2, 3])
    random = np.random.default_rng(0)
    for _ in range(300):
        for token_id in random.integers(0, 32, random.integers(0, 6)):
            slot.append(int(token_id))
        if random.random() < 0.3:
            slot.truncate(int(random.integers(0, len(slot.tokens) + 1)))
        if random.random() < 0.7:  # what is appended between two looks is taken in at once
            assert slot.history.tolist() == slot.tokens
    assert slot.tokens[:3] == [1, 2, 3]
