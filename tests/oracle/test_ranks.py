"""Networks divided over ranks against the same networks whole; what is saved of either continues in the other."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from slipstream.engine.cache import saved as saving
from slipstream.engine.cache.snapshots import Snapshots
from slipstream.engine.errors import LoadError, SettingError, UnsupportedModel
from slipstream.engine.models.registry import load_network
from slipstream.kernels.matmul import narrow as narrow_products
from tests import quantised
from tests.checkpoints import N_PROMPT, edited, tiny_checkpoint
from tests.gguf_files import gguf_of
from tests.oracle import test_exact
from tests.oracle.feeding import CPU, N_CTX, SIZES, Runner, compare_ragged, difference, loaded, rows
from tests.oracle.test_gemma4 import VARIANTS
from tests.ranks import Divided
from tests.tiny_families import FAMILIES

pytestmark = pytest.mark.usefixtures("_selected")
CUTS = [33, 1, 15, 2, 49]
# Of logits whose standard deviation is 0.6. Two orders of the same sums in float32; recurrent states add the most.
NEAR_WHOLE = 2e-5
SIX_HEADS = ("step3p7", 4)
FOUR_HEADS = {"linear_num_key_heads": 4}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """A family's tiny checkpoint; made once."""
    made: dict[str, Path] = {}

    def get(family: str, **changes: Any) -> Path:
        key = f"{family} {changes}"
        if key not in made:
            made[key] = tiny_checkpoint(family, tmp_path_factory.mktemp(family), changes=changes)
        return made[key]

    return get


@contextmanager
def divided(folder: Path, n: int, dtype: torch.dtype = torch.float32) -> Iterator[Divided]:
    one = Divided(folder, n, dtype, N_CTX, None if folder.suffix else 384)
    try:
        yield one
    finally:
        one.close()


def of_ranks(folder: Path, n: int, ids: list[int], dtype: torch.dtype = torch.float32) -> Tensor:
    """Logits of a text on n ranks, [n_tokens, vocab]."""
    with divided(folder, n, dtype) as ranks:
        return Runner(ranks.network, ranks.store(SIZES)).feed_chunks(0, ids, CUTS)


def prompt() -> Tensor:
    return torch.randint(384, (N_PROMPT,), generator=torch.Generator().manual_seed(1))


@pytest.mark.sampled(keep=8)
@pytest.mark.parametrize(
    ("family", "n"), [(family, n) for family in FAMILIES for n in (2, 4) if (family, n) != SIX_HEADS]
)
def test_logits_are_those_of_the_whole(checkpoint: Callable[..., Path], family: str, n: int) -> None:
    """In chunks, and with drafts partly kept beside other slots: states that ranks park and fold are the same."""
    folder = checkpoint(family, **(FOUR_HEADS if family in ("qwen3_5", "qwen3_5_moe", "qwen3_next") else {}))
    ids = prompt()
    whole = Runner(loaded(folder)).feed_chunks(0, ids.tolist(), CUTS)
    with divided(folder, n) as ranks:
        runner = Runner(ranks.network, ranks.store(SIZES))
        found = runner.feed_chunks(0, ids.tolist(), CUTS)
        assert difference(found, whole) < NEAR_WHOLE
        assert torch.equal(found.argmax(-1), whole.argmax(-1))
        assert ranks.network.n_params == loaded(folder).n_params
        if n == 2:
            compare_ragged(Runner(ranks.network, ranks.store(SIZES)), ids, whole, seed=3)


@pytest.mark.sampled(keep=9)
def test_experts_whose_inputs_come_before_their_outputs(
    checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    """As Qwen3-VL's were released: gates and ups lie side by side, and a rank has a part of both."""
    folder, ids = checkpoint("qwen3_vl_moe"), prompt().tolist()

    def turn(tensors: dict[str, Tensor]) -> None:
        for name, one in tensors.items():
            if ".experts." in name:
                tensors[name] = one.transpose(1, 2).contiguous()

    turned = edited(folder, tmp_path / "turned", turn)
    assert torch.equal(of_ranks(turned, 2, ids), of_ranks(folder, 2, ids))


@pytest.mark.sampled(keep=9)
@pytest.mark.parametrize("family", ["llama", "gpt_oss"])
def test_biases_are_added_once(checkpoint: Callable[..., Path], family: str) -> None:
    biases = {"attention_bias": True, "mlp_bias": True} if family == "llama" else {}
    folder = checkpoint(family, **biases)
    ids = prompt().tolist()
    assert difference(of_ranks(folder, 4, ids), Runner(loaded(folder)).feed_chunks(0, ids, CUTS)) < NEAR_WHOLE


@pytest.mark.sampled(keep=9)
@pytest.mark.parametrize("variant", ["sparse", "keys as values"])
def test_gemma_4_with_experts_that_are_summed_before_norms(
    checkpoint: Callable[..., Path], variant: str
) -> None:
    """Gates and inputs of its experts lie in one tensor, all gates of an expert first."""
    family, changes = VARIANTS[variant]
    folder, ids = checkpoint(family, **changes), prompt().tolist()
    assert difference(of_ranks(folder, 2, ids), Runner(loaded(folder)).feed_chunks(0, ids, CUTS)) < NEAR_WHOLE


@pytest.mark.sampled(keep=9)
@pytest.mark.parametrize("vocab", [385, 390])
def test_a_vocabulary_that_does_not_come_out_even(checkpoint: Callable[..., Path], vocab: int) -> None:
    """The last rank has rows of no token, and no logit of them is seen."""
    folder, ids = checkpoint("qwen3", vocab_size=vocab), prompt().tolist()
    with divided(folder, 4) as ranks:
        found = Runner(ranks.network, ranks.store(SIZES)).feed_chunks(0, ids, CUTS)
    assert found.shape == (N_PROMPT, 384)
    assert difference(found, Runner(loaded(folder)).feed_chunks(0, ids, CUTS)) < NEAR_WHOLE


@pytest.mark.sampled(keep=4)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", ["qwen3", "qwen3_5", "qwen3_moe", "deepseek_v3", "gemma4"])
@torch.inference_mode()
def test_a_row_has_the_same_bits_whatever_is_beside_it(
    checkpoint: Callable[..., Path], family: str, dtype: torch.dtype
) -> None:
    with divided(checkpoint(family), 2, dtype) as ranks:

        def judged(width: int, n_slots: int, seed: int) -> Tensor:
            store = ranks.store(test_exact.SIZES)
            texts = test_exact.Sequences(ranks.network, n_slots, seed, store)
            return torch.cat(list(texts.judged(width)))

        meant = judged(1, 1, 0)
        for seed, (width, n_slots) in enumerate([(1, 4), (3, 1), (5, 4), (16, 1), (2, 32)]):
            assert torch.equal(judged(width, n_slots, seed), meant), f"{width} rows, {n_slots} slots"


CODINGS: dict[str, Callable[[], quantised.Coding]] = {
    "fp8": lambda: quantised.fp8((16, 16)),
    "fp8-whole": quantised.fp8_whole,
    "fp8-channel": lambda: quantised.compressed_fp8("channel"),
    "awq": lambda: quantised.awq(16),
    "gptq": lambda: quantised.gptq(16, symmetric=False),
    "compressed": lambda: quantised.compressed_int4(16, symmetric=True),
    "compressed-zeros": lambda: quantised.compressed_int4(16, symmetric=False),
}


@pytest.mark.sampled(keep=5)
@pytest.mark.parametrize(
    ("family", "name"),
    [
        *((family, name) for family in ("qwen3", "qwen3_moe") for name in CODINGS),
        *(
            ("qwen3_5", name) for name in CODINGS if name.startswith("fp8")
        ),  # two betas are no word of eight codes
    ],
)
def test_narrow_weights_are_cut_as_wide_weights_are(
    checkpoint: Callable[..., Path], tmp_path: Path, family: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit for bit what the same values give, stored as plain numbers and divided, where products widen them."""
    monkeypatch.setattr(narrow_products, "refusal", lambda: "they are to be seen as they are read")
    narrow, dense = quantised.write_quantised(checkpoint(family), tmp_path, CODINGS[name]())
    ids = prompt().tolist()
    assert torch.equal(of_ranks(narrow, 2, ids), of_ranks(dense, 2, ids))


@pytest.mark.sampled(keep=9)
@pytest.mark.parametrize("kind", ["Q8_0", "Q4_K"])
def test_blocks_of_gguf_are_cut_between_blocks(tmp_path: Path, kind: str) -> None:
    wide = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 8, "head_dim": 64}
    folder = tiny_checkpoint("qwen3", tmp_path / "folder", changes={**wide, "num_hidden_layers": 2})
    file = gguf_of(folder).as_type(kind).write(tmp_path / "model.gguf")
    ids = prompt().tolist()
    whole = Runner(load_network(file, torch.float32, CPU, N_CTX)).feed_chunks(0, ids, CUTS)
    assert difference(of_ranks(file, 2, ids), whole) / float(whole.std()) < NEAR_WHOLE


REFUSED: dict[str, tuple[Callable[[], quantised.Coding], int, str]] = {
    "groups shuffled": (lambda: quantised.gptq(32, symmetric=False, shuffled=True), 2, "shuffles the inputs"),
    "blocks cut": (lambda: quantised.fp8((48, 24)), 2, "do not begin where blocks of"),
    "groups cut": (lambda: quantised.awq(64), 4, "group_size = 64"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_cut_is_refused(checkpoint: Callable[..., Path], tmp_path: Path, case: str) -> None:
    coding, n, words = REFUSED[case]
    narrow, _ = quantised.write_quantised(checkpoint("qwen3"), tmp_path, coding())
    with pytest.raises(UnsupportedModel, match=words):
        Divided(narrow, n, torch.float32, N_CTX, 384)


def test_heads_that_do_not_come_out_even(checkpoint: Callable[..., Path]) -> None:
    with pytest.raises(
        SettingError, match="--tensor-parallel-size 3: must divide the model's 4 attention heads"
    ):
        Divided(checkpoint("qwen3"), 3, torch.float32, N_CTX, 384)


@pytest.mark.parametrize("factor", [2, 4])
def test_a_part_is_not_cut_out_of_another_models_tensor(
    checkpoint: Callable[..., Path], tmp_path: Path, factor: int
) -> None:
    """A file with half of what the config says holds just what a rank of two would ask for."""

    def halve(tensors: dict[str, Tensor]) -> None:
        for name in list(tensors):
            if name.endswith(("gate_proj.weight", "up_proj.weight")):
                tensors[name] = tensors[name][: 128 // factor].clone()
            if name.endswith("down_proj.weight"):
                tensors[name] = tensors[name][:, : 128 // factor].clone()

    with pytest.raises(
        LoadError, match=r"gate_proj.weight has shape \[.*\], the config asks for \[128, 64\]"
    ):
        Divided(edited(checkpoint("qwen3"), tmp_path / "halved", halve), 2, torch.float32, N_CTX, 384)


@pytest.mark.sampled(keep=4)
@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1), (2, 4), (4, 2)])
@pytest.mark.parametrize("family", ["qwen3", "qwen3_5", "gemma3", "deepseek_v3"])
@torch.inference_mode()
def test_a_saved_prefix_is_independent_of_the_number_of_ranks(
    checkpoint: Callable[..., Path], family: str, before: int, after: int
) -> None:
    """Pages, pages of windows and snapshots: what is loaded on other ranks has the bytes that were saved."""
    folder = checkpoint(family, **(FOUR_HEADS if family == "qwen3_5" else {}))
    ids = prompt().tolist()[:96]  # whole pages
    with runner_of(folder, before) as one, runner_of(folder, after) as other:
        one.feed(rows(0, ids, 0, len(ids)))
        one.cache.publish(0, ids, len(ids))
        kept = saving.save(one.cache, ids, "")
        assert len(kept.tokens) == len(ids)
        assert saving.fits(other.cache, kept)
        saving.load(other.cache, kept, "")
        again = saving.save(other.cache, ids, "")
        assert again.tokens == kept.tokens
        for mine, theirs in zip(tensors_of(again), tensors_of(kept), strict=True):
            assert torch.equal(mine, theirs)
        n_past = other.cache.begin(1, [*ids, 5, 6, 7], "")
        assert n_past == len(ids)
        far = other.feed(rows(1, [*ids, 5, 6, 7], n_past, 3))
        near = Runner(loaded(folder)).feed(rows(0, [*ids, 5, 6, 7], 0, 99))[-3:]
        assert difference(far, near) < NEAR_WHOLE


def tensors_of(kept: saving.Saved) -> list[Tensor]:
    parts = [*kept.rows["target"], *kept.windows["target"].rows] if kept.windows else [*kept.rows["target"]]
    return parts + [one for states in kept.states.values() for one in states]


@contextmanager
def runner_of(folder: Path, n: int) -> Iterator[Runner]:
    if n == 1:
        yield with_snapshots(Runner(loaded(folder)))
        return
    with divided(folder, n) as ranks:
        yield with_snapshots(Runner(ranks.network, ranks.store(SIZES)))


def with_snapshots(runner: Runner) -> Runner:
    """The runner with a cache that keeps the states of recurrent layers."""
    stores, old = runner.cache.stores, runner.cache
    runner.cache = type(old)(stores, SIZES.n_slots, SIZES.n_pages, SIZES.page_size, Snapshots(2**24))
    return runner


@torch.inference_mode()
def test_a_shared_page_is_copied_on_every_rank(checkpoint: Callable[..., Path]) -> None:
    """Two slots go on from one prefix within its last page."""
    folder = checkpoint("qwen3")
    ids = prompt().tolist()[:40]
    with runner_of(folder, 2) as ranks, runner_of(folder, 1) as whole:
        said = []
        for one in (ranks, whole):
            one.feed(rows(0, ids, 0, len(ids)))
            one.cache.publish(0, ids, len(ids))
            start = one.cache.begin(1, ids[:32], "") - 3  # within a page that slot 0 holds too
            other = [*ids[:start], 7, 8, 9, 10, 5]
            one.feed(rows(1, other, start, 4))
            said.append(
                torch.cat((one.feed(rows(0, [*ids, 5], 40, 1)), one.feed(rows(1, other, start + 4, 1))))
            )
    assert difference(*said) < NEAR_WHOLE
