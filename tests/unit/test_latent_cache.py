"""Latents in the cache: what they take, pages that are copied, saved and restored."""

from __future__ import annotations

import torch

from slipstream.engine.cache import saved
from slipstream.engine.cache.cache import Cache
from slipstream.engine.cache.latent import Latent
from slipstream.engine.cache.need import Sizes
from slipstream.engine.cache.store import Store

SIZE, TOKENS = 4, list(range(1, 15))  # three full pages and two tokens
NEEDS = [Latent(8, 4), Latent(8, 4)]
BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn


def make_cache(dtype: torch.dtype | None = None) -> Cache:
    sizes = Sizes(n_slots=2, n_pages=8, page_size=SIZE)
    store = Store([need.kept_in(dtype) for need in NEEDS], sizes, BF16, torch.device("cpu"))
    return Cache({"target": store}, 2, 8, SIZE)


def fed(cache: Cache, slot: int) -> Store:
    """The slot's pages hold random bits for TOKENS."""
    store, generator = cache.stores["target"], torch.Generator().manual_seed(1)
    cache.begin(slot, TOKENS, "")
    assert cache.reserve(slot, "target", cache.length(slot, "target"), len(TOKENS))
    for tensor in store.held.page_tensors("full"):
        codes = tensor.view(torch.uint8)
        codes.copy_(torch.randint(0, 120, codes.shape, dtype=torch.uint8, generator=generator))
    cache.commit(slot, "target", len(TOKENS))
    cache.publish(slot, TOKENS, len(TOKENS))
    return store


def test_what_a_token_takes() -> None:
    assert NEEDS[0].token_bytes(BF16) == 24
    assert NEEDS[0].kept_in(FP8).token_bytes(BF16) == 12
    assert (NEEDS[0].slot_bytes(BF16), NEEDS[0].window, NEEDS[0].is_recurrent) == (0, None, False)
    store = make_cache(FP8).stores["target"]
    assert store.token_bytes == 24
    assert [(one.dtype, one.shape[1:]) for one in store.held.page_tensors("full")] == [(FP8, (SIZE, 12))] * 2
    assert store.is_positional


def test_a_shared_page_is_copied_before_it_is_written() -> None:
    cache = make_cache()
    store = fed(cache, 0)
    before = [tensor.clone() for tensor in store.held.page_tensors("full")]
    assert cache.begin(1, TOKENS, "") == 12
    assert cache.reserve(1, "target", 10, 11)  # within the third page, which slot 0 holds too
    copied = [
        [i for i in range(8) if torch.equal(tensor[i], old[j]) and not torch.equal(old[i], old[j])]
        for tensor, old in zip(store.held.page_tensors("full"), before, strict=True)
        for j in range(8)
    ]
    assert sum(map(len, copied)) == len(NEEDS), "one page of each layer became another's equal"


def test_saved_and_restored_bit_for_bit() -> None:
    source = make_cache()
    fed(source, 0)
    taken = saved.save(source, TOKENS, "")
    target = make_cache()
    assert saved.fits(target, taken)
    assert not saved.fits(make_cache(FP8), taken)
    saved.load(target, taken, "")
    again = saved.save(target, TOKENS, "")
    for one, other in zip(taken.rows["target"], again.rows["target"], strict=True):
        assert one.numel() > 0
        assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))
