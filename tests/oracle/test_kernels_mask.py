"""Grammar masks: every implementation forbids exactly the tokens whose bit is 0."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import kernels
from kernels.mask.op import mask

pytestmark = pytest.mark.usefixtures("_selected")


@pytest.mark.usefixtures("ops")
@pytest.mark.parametrize("vocab", [1, 31, 32, 33, 4096, 5003])
@pytest.mark.parametrize("n_spare", [0, 1])
def test_forbidden_tokens_are_never_picked_and_others_are_untouched(vocab: int, n_spare: int) -> None:
    random = np.random.default_rng(vocab)
    n_words = -(-vocab // 32) + n_spare
    words = random.integers(-(2**31), 2**31, (3, n_words), dtype=np.int64).astype(np.int32)
    words[1], words[2] = 0, -1
    logits = torch.randn(5, vocab, generator=torch.Generator().manual_seed(0))
    expected = logits.clone()
    for row, one in zip((3, 0, 4), words, strict=True):
        for token_id in range(vocab):
            if not int(one[token_id // 32]) >> (token_id % 32) & 1:
                expected[row, token_id] = -torch.inf
    mask(logits, torch.tensor([3, 0, 4]), torch.from_numpy(words))
    assert torch.equal(logits, expected)


def test_the_cpu_has_its_own() -> None:
    chosen = {one.op: one.implementation for one in kernels.select(torch.device("cpu"), torch.float32)}
    assert chosen["mask"] == "cpu"
