"""Inflated draft heads over inflated targets draft what the small ones do over the small target."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from slipstream.engine.batch import Span
from slipstream.engine.models.heads.block_backbone import BlockDraft
from slipstream.engine.models.heads.dflash import load_dflash
from slipstream.engine.models.heads.eagle3 import Eagle3, load_eagle3
from slipstream.engine.models.heads.mtp import Mtp, load_mtp
from slipstream.engine.models.network import Network
from slipstream.engine.models.registry import load_network
from slipstream.engine.text.tokenizer import Tokenizer
from tests import head_checkpoints as made
from tests.bench.inflate import inflate
from tests.bench.inflate_heads import inflate_head
from tests.checkpoints import tiny_checkpoint
from tests.oracle.head_rounds import CPU, N_CTX, Pages, block_at, streams_of, text

pytestmark = [pytest.mark.usefixtures("_selected"), pytest.mark.sampled(keep=1)]
AnyDraft = Eagle3 | Mtp | BlockDraft
LOADERS: dict[str, Callable[..., AnyDraft]] = {"eagle3": load_eagle3, "mtp": load_mtp, "dflash": load_dflash}
DEMO = Path("demo")
N_TEXT = 96
DEMO_SIZES = {"hidden": 1024, "layers": 7, "ffn": 1024, "heads": 16, "kv_heads": 8}
TINY_SIZES = {"hidden": 256, "layers": 9, "ffn": 200, "heads": 8, "kv_heads": 4}
EAGLE = {**made.SHAPE, "architectures": ["LlamaForCausalLMEagle3"]}
# name -> loader, tensors, config
TINY: dict[str, tuple[str, dict[str, Tensor], dict[str, Any]]] = {
    "eagle3 with default taps": ("eagle3", made.eagle3("midlayer", 8, n_draft_ids=100), EAGLE),
    "eagle3 in layers.0 with biases": (
        "eagle3",
        made.eagle3("layers.0", 8, n_draft_ids=60, bias=True),
        EAGLE | {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [-1, 2, 4]}},
    ),
    "eagle3 with heads times 4": (
        "eagle3",
        made.eagle3("midlayer", 8, n_draft_ids=60, d_head=4),
        EAGLE | {"head_dim": 4},
    ),
    "mtp": ("mtp", made.mtp_mimo(5), {**made.SHAPE, "num_hidden_layers": 6}),
    "dflash": ("dflash", made.dflash(30, n_layers=3, n_taps=3), made.DFLASH_CONFIG),
    "dflash with heads times 2": (
        "dflash",
        made.dflash(30, n_layers=1, n_taps=3, d_head=8),
        made.DFLASH_CONFIG,
    ),
    "dflash with heads times 4": (
        "dflash",
        made.dflash(30, n_layers=2, n_taps=2, d_head=4),
        made.DFLASH_CONFIG | {"dflash_config": {"mask_token_id": 381, "target_layer_ids": [1, 5]}},
    ),
    "dflash with more of all": (
        "dflash",
        made.dflash(30, n_layers=1, n_taps=1, d_head=32),
        made.DFLASH_CONFIG | {"dflash_config": {"mask_token_id": 381}, "target_layer_ids": [3]},
    ),
}


def drafted(head: AnyDraft, target: Network, ids: list[int]) -> Tensor:
    """Logits of all rows of a text, float32: of the first and second guess, or of blocks along it."""
    streams, pages = streams_of(target, ids[:-1], head.taps), Pages(head.needs, target.dtype)
    with torch.inference_mode():
        if isinstance(head, BlockDraft):
            return blocks_along(head, streams, pages, ids)
        n, module = len(ids) - 1, head.modules[0]
        first, state = pages.run(module, head.fuse(streams), Span(0, ids[1:], 0, 0, n))
        # What each row returned leads into the row after it, in another slot.
        second, _ = pages.run(module, state[:-1], Span(1, ids[2:], 0, 0, n - 1))
    return torch.cat((first, second))


def blocks_along(head: BlockDraft, streams: list[Tensor], pages: Pages, ids: list[int]) -> Tensor:
    """Logits of a block every seven tokens of a text."""
    found = []
    for start in range(0, len(ids) - 8, 7):
        rows = pages.batch(Span(0, ids[start : start + 7], start, 0, 0))
        head.inject(rows, [stream[start : start + 7] for stream in streams], pages.store)
        block = block_at(head, 0, ids, start + 7, head.n_drafts)
        found.append(head.run(pages.batch(block), pages.store)[0])
    return torch.cat(found)


def loaded(loader: str, target: Path, head: Path, dtype: torch.dtype) -> tuple[Network, AnyDraft]:
    vocab = json.loads((target / "config.json").read_text())["vocab_size"]
    network = load_network(target, dtype, CPU, N_CTX, vocab)
    return network, LOADERS[loader](head, network, N_CTX)


Compared = tuple[float, float]


def compare(
    small: tuple[Network, AnyDraft], big: tuple[Network, AnyDraft], texts: list[list[int]]
) -> Compared:
    """(largest difference over the spread of a row's logits, share of rows with the same first choice).

    New tokens must be out of the question.
    """
    largest, same, n_rows = 0.0, 0, 0
    for ids in texts:
        expected, found = (drafted(head, target, ids) for target, head in (small, big))
        vocab = expected.shape[1]
        old, new = found[:, :vocab], found[:, vocab:]
        known = ~expected.isinf()
        assert torch.equal(known, ~old.isinf())
        spread = expected[known].view(len(expected), -1).std(dim=1, keepdim=True)  # [n_rows, 1]
        gap = (old - expected).masked_fill(~known, 0.0).abs()  # [n_rows, vocab]
        largest = max(largest, float((gap / spread).max()))
        same += int((old.argmax(1) == expected.argmax(1)).sum())
        n_rows += len(expected)
        assert (new < expected[known].min() - 100).all()
    return largest, same / n_rows


@pytest.mark.parametrize("vocab", [384, 1000])
@pytest.mark.parametrize("name", TINY)
def test_same_drafts(tmp_path: Path, name: str, vocab: int) -> None:
    loader, tensors, config = TINY[name]
    changes = {"num_hidden_layers": 6}
    source = tiny_checkpoint("llama", tmp_path / "small", changes=changes)
    head = made.write(tmp_path / "head", tensors, config)
    inflate(source, tmp_path / "big", {**TINY_SIZES, "vocab": vocab})
    new = inflate_head(head, tmp_path / "big", tmp_path / "big-head")
    small = loaded(loader, source, head, torch.float32)
    big = loaded(loader, tmp_path / "big", tmp_path / "big-head", torch.float32)
    largest, same = compare(small, big, [text(4), text(5)])
    if (
        loader == "mtp" and vocab > 384
    ):  # approximate, as `inflate_heads` says, most of all where rows are short
        assert same > 0.9
    else:
        assert largest < 1e-3
        assert same == 1.0
    assert (new.hidden, new.ffn, new.heads, new.kv_heads) == (256, 200, 8, 4)
    for inner, weight in load_file(tmp_path / "big-head" / "model.safetensors").items():
        if inner.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight", "gate_proj.weight")):
            assert weight[-1].abs().min() > 0  # zero matrices would measure nothing


def test_vocabulary_of_eagle3(tmp_path: Path) -> None:
    """The reduced vocabulary stays; the table of what can be drafted has a row for every new token."""
    tensors = made.eagle3("midlayer", 8, n_draft_ids=100)
    source = tiny_checkpoint("llama", tmp_path / "small")
    head = made.write(tmp_path / "head", tensors, EAGLE)
    inflate(source, tmp_path / "big", {"hidden": 256, "vocab": 1000})
    inflate_head(head, tmp_path / "big", tmp_path / "out", {"ffn": 120})
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert torch.equal(found["d2t"], tensors["d2t"])
    assert torch.equal(found["t2d"][:384], tensors["t2d"])
    assert not found["t2d"][384:].any()
    assert found["t2d"].shape == (1000,)
    assert found["midlayer.mlp.down_proj.weight"].shape == (256, 120)


@pytest.mark.parametrize(
    ("tensors", "config", "reason"),
    [
        (made.eagle3("midlayer", 8), EAGLE, "d2t"),
        (made.eagle3("midlayer", 8, n_draft_ids=9), EAGLE | {"aux_hidden_states_layer_ids": [1]}, "counts"),
        (made.mtp_deepseek("model.layers.0.", 4), made.SHAPE, "another layout"),
        (made.mtp_mimo(5), made.SHAPE, "for 36 layers"),
        (made.dflash(30, n_layers=1, n_taps=1), {**made.SHAPE, "num_target_layers": 4}, "target_layer_ids"),
        (made.dflash(30, n_layers=1, n_taps=3), made.DFLASH_CONFIG, "for 6 layers"),
    ],
)
def test_refused(tmp_path: Path, tensors: dict[str, Tensor], config: dict[str, Any], reason: str) -> None:
    source = tiny_checkpoint("llama", tmp_path / "small")
    inflate(source, tmp_path / "big", {"hidden": 256, "layers": 6})
    with pytest.raises(ValueError, match=reason):
        inflate_head(made.write(tmp_path / "head", tensors, config), tmp_path / "big", tmp_path / "out")


@pytest.fixture(scope="module", params=[4096, 6000], ids=["same vocabulary", "larger vocabulary"])
def big_demo(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("demo") / "big"
    inflate(DEMO / "target", folder, {**DEMO_SIZES, "vocab": request.param})
    return folder


@pytest.mark.parametrize("name", LOADERS)
def test_demo_heads(big_demo: Path, tmp_path: Path, name: str, *, is_whole: bool) -> None:
    """Exact in float32 as far as `inflate_heads` promises it; nearly all first choices in bfloat16."""
    inflate_head(DEMO / name, big_demo, tmp_path)
    approximate = name == "mtp" and json.loads((big_demo / "config.json").read_text())["vocab_size"] > 4096
    ids = Tokenizer(DEMO / "target").encode(Path(__file__).read_text())
    n_texts = 4 if is_whole else 2
    texts = [ids[start : start + N_TEXT] for start in range(0, n_texts * N_TEXT, N_TEXT)]
    for dtype in (torch.float32, torch.bfloat16):
        small = loaded(name, DEMO / "target", DEMO / name, dtype)
        largest, same = compare(small, loaded(name, big_demo, tmp_path, dtype), texts)
        assert same >= (0.97 if approximate else 0.99)
        assert dtype != torch.float32 or largest < (0.1 if approximate else 1e-3)
