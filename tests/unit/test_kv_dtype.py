"""Keys and values in a dtype of their own: sizes, pages that are copied, saved and restored."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from slipstream.engine.cache import saved
from slipstream.engine.cache.cache import Cache
from slipstream.engine.cache.kv import KV
from slipstream.engine.cache.need import Need, Sizes
from slipstream.engine.cache.recurrent import Recurrent
from slipstream.engine.cache.store import Store
from slipstream.engine.errors import SettingError
from slipstream.engine.models.registry import read_model
from slipstream.engine.service.start.draft_network import DraftSource, head_token_bytes
from slipstream.engine.service.start.launch import _fingerprint
from slipstream.engine.service.start.sizes import Checkpoint
from slipstream.engine.service.tools.forecast import forecast
from slipstream.engine.settings import Settings
from tests.public_configs import CONFIGS

ROOT = Path(__file__).parents[2]
FP8 = torch.float8_e4m3fn
SIZE, TOKENS = 4, list(range(1, 15))  # three full pages and two tokens
NEEDS: list[Need] = [KV(2, 8), KV(2, 8, 6)]


NARROWER: list[Need] = [KV(2, 8, d_value=6), KV(3, 8, 6, d_value=2)]


def make_cache(dtype: torch.dtype | None, needs: list[Need] = NEEDS) -> Cache:
    sizes = Sizes(n_slots=2, n_pages=8, page_size=SIZE, n_window_pages=8)
    store = Store([need.kept_in(dtype) for need in needs], sizes, torch.bfloat16, torch.device("cpu"))
    return Cache({"target": store}, 2, 8, SIZE)


def filled(cache: Cache) -> Cache:
    """A request of random bits that has ended and left its pages."""
    generator = torch.Generator().manual_seed(1)
    cache.begin(0, TOKENS, "")
    store = cache.stores["target"]
    assert cache.reserve(0, "target", 0, len(TOKENS))
    for tensor in (*store.held.page_tensors("full"), *store.held.page_tensors("window")):
        codes = tensor.view(torch.uint8)
        codes.copy_(torch.randint(0, 120, codes.shape, dtype=torch.uint8, generator=generator))
    cache.commit(0, "target", len(TOKENS))
    cache.publish(0, TOKENS, len(TOKENS))
    cache.drop(0)
    return cache


def test_only_keys_and_values_have_it() -> None:
    state = Recurrent(n_key_heads=1, n_value_heads=2, d_key=4, d_value=4, conv_width=4)
    full, window, recurrent = (need.kept_in(FP8) for need in [*NEEDS, state])
    assert recurrent is state
    assert (full.token_bytes(torch.bfloat16), NEEDS[0].token_bytes(torch.bfloat16)) == (32, 64)
    assert (window.window_bytes(torch.bfloat16), NEEDS[1].window_bytes(torch.bfloat16)) == (32, 64)
    assert [need.kept_in(None) for need in NEEDS] == NEEDS
    cache = make_cache(FP8)
    store = cache.stores["target"]
    assert {one.dtype for one in (*store.held.page_tensors("full"), *store.held.page_tensors("window"))} == {
        FP8
    }
    assert store.token_bytes == 32


def test_values_narrower_than_keys_take_their_own_room() -> None:
    full, window = NARROWER
    assert (full.token_bytes(torch.bfloat16), full.window_bytes(torch.bfloat16)) == (2 * (8 + 6) * 2, 0)
    assert (window.token_bytes(torch.bfloat16), window.window_bytes(torch.bfloat16)) == (0, 3 * (8 + 2) * 2)
    assert full.kept_in(FP8).token_bytes(torch.bfloat16) == 2 * (8 + 6)
    store = make_cache(None, NARROWER).stores["target"]
    shapes = [(tuple(one.keys.shape), tuple(one.values.shape)) for one in store.layers]
    assert shapes == [((9, 2, SIZE, 8), (9, 2, SIZE, 6)), ((9, 3, SIZE, 8), (9, 3, SIZE, 2))]


def test_a_prefix_of_other_widths_does_not_fit() -> None:
    taken = saved.save(filled(make_cache(None, NARROWER)), TOKENS, "")
    assert not saved.fits(make_cache(None, [KV(2, 8, d_value=2), KV(3, 8, 6, d_value=2)]), taken)


@pytest.mark.parametrize("needs", [NEEDS, NARROWER], ids=["as-wide", "narrower"])
def test_saved_and_restored_bit_for_bit(needs: list[Need]) -> None:
    source = filled(make_cache(FP8, needs))
    taken = saved.save(source, TOKENS, "")
    assert len(taken.tokens) == 12
    target = make_cache(FP8, needs)
    assert saved.fits(target, taken)
    saved.load(target, taken, "")
    again = saved.save(target, TOKENS, "")
    pairs = [
        *zip(taken.rows["target"], again.rows["target"], strict=True),
        *zip(taken.windows["target"].rows, again.windows["target"].rows, strict=True),
    ]
    for one, other in pairs:
        assert one.numel() > 0
        assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))
    assert target.begin(1, TOKENS, "") == 12


def test_a_prefix_of_another_dtype_does_not_fit() -> None:
    narrow, wide = (saved.save(filled(make_cache(dtype)), TOKENS, "") for dtype in (FP8, None))
    assert not saved.fits(make_cache(None), narrow)
    assert not saved.fits(make_cache(FP8), wide)


def test_a_shared_page_is_copied_before_it_is_written() -> None:
    cache = filled(make_cache(FP8))
    for slot in (0, 1):
        assert cache.begin(slot, TOKENS, "") == 12
    keys = cache.stores["target"].layers[0].keys
    shared = cache.table(0)[2]
    assert cache.table(1)[2] == shared
    assert cache.reserve(0, "target", 11, 12)
    own = cache.table(0)[2]
    assert own != shared
    assert torch.equal(keys[own].view(torch.uint8), keys[shared].view(torch.uint8))


@pytest.mark.parametrize("name", ["Qwen3-8B", "Gemma-3-1B", "Qwen3.5-27B"])
def test_a_forecast_counts_it(tmp_path: Path, name: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIGS[name]))
    settings = Settings(model=str(path), ctx_size=4096, dtype="bfloat16")
    plain, narrow = forecast(settings), forecast(replace(settings, kv_cache_dtype="fp8"))
    for one, other in zip(plain.networks.values(), narrow.networks.values(), strict=True):
        assert one.token_bytes == 2 * other.token_bytes
        assert one.slot_bytes == other.slot_bytes
    assert (plain.taken.pages, plain.taken.windows) == (2 * narrow.taken.pages, 2 * narrow.taken.windows)
    assert forecast(replace(settings, kv_cache_dtype="fp8_e4m3")) == narrow


def test_heads_keep_theirs_in_it_too() -> None:
    target = ROOT / "demo/target"
    config = read_model(target)
    checkpoint = Checkpoint(target, config, torch.device("cpu"), torch.bfloat16)
    source = DraftSource("draft-eagle3", ROOT / "demo/eagle3")
    plain, narrow = (
        head_token_bytes(source, checkpoint, Settings(kv_cache_dtype=one)) for one in ("auto", "fp8")
    )
    assert plain == 2 * narrow > 0


def test_a_server_says_that_it_writes_other_text(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    told = {_fingerprint(tmp_path, Settings(kv_cache_dtype=one), ()) for one in ("auto", "fp8")}
    assert len(told) == 2


@pytest.mark.parametrize("value", ["int8", "fp8_e5m2", "bfloat16"])
def test_other_types_are_refused(tmp_path: Path, value: Any) -> None:
    with pytest.raises(SettingError, match="must be one of auto, fp8, fp8_e4m3"):
        forecast(Settings(model=str(tmp_path), kv_cache_dtype=value))
