"""Draft networks in GGUF files: prediction layers beside their model or alone, draft heads, and pairs of files."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from slipstream.engine.batch import Span
from slipstream.engine.errors import DraftMismatch, LoadError
from slipstream.engine.models.heads.block_backbone import BlockDraft
from slipstream.engine.models.heads.head_choices import NO_CHOICE
from slipstream.engine.models.heads.mtp import load_mtp
from slipstream.engine.models.network import Network
from slipstream.engine.models.registry import load_network, read_model
from slipstream.engine.service.start.draft_network import draft_source, head_token_bytes
from slipstream.engine.service.start.sizes import Checkpoint
from slipstream.engine.settings import Settings
from slipstream.engine.speculate.registry import NETWORKS, kind_of
from tests import head_checkpoints as made
from tests.checkpoints import tiny_checkpoint
from tests.gguf_files import Contents, gguf_of
from tests.oracle.head_rounds import CPU, N_CTX, VOCAB, Pages, block_at, text
from tests.oracle.lab import DEMO, Bench, Folders, Lab, play
from tests.oracle.lossless import demo_cases, disturbed

pytestmark = pytest.mark.usefixtures("_selected")
N = 40
# Of each family with prediction layers: the layer of the model that a copy of is one, and what copies are called.
MTP = {
    "glm4_moe": ("model.layers.3.", "model.layers.4."),
    "qwen3_5": ("model.layers.2.", "mtp.layers.0."),
    "qwen3_5_moe": ("model.layers.2.", "mtp.layers.0."),
    "qwen3_next": ("model.layers.2.", "mtp.layers.0."),
}
GLM_ENDS = ("eh_proj", "enorm", "hnorm", "shared_head.norm")
QWEN_ENDS = ("fc", "pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")


def mtp_tensors(family: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """A prediction layer: the block of one of the model's own layers, and new ends."""
    of, to = MTP[family]
    make = made.Maker(2)
    own = {
        name.replace(of, to, 1): one.flip(0).clone() for name, one in tensors.items() if name.startswith(of)
    }
    is_glm = family == "glm4_moe"
    joint, *norms = [f"{to if is_glm else 'mtp.'}{one}.weight" for one in (GLM_ENDS if is_glm else QWEN_ENDS)]
    own[joint] = make.matrix(made.D_MODEL, 2 * made.D_MODEL)
    return own | {name: make.scale(made.D_MODEL, one_plus=not is_glm) for name in norms}


@pytest.fixture(scope="module")
def with_mtp(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A family's checkpoint with a prediction layer in its folder, made once."""
    known: dict[str, Path] = {}

    def get(family: str) -> Path:
        if family not in known:
            folder = tiny_checkpoint(family, tmp_path_factory.mktemp(family))
            known[family] = made.add_tensors(
                folder, mtp_tensors(family, load_file(folder / "model.safetensors"))
            )
        return known[family]

    return get


def loaded(path: Path) -> Network:
    return load_network(path, torch.float32, CPU, N_CTX, VOCAB)


def streams(head: Any, seed: int) -> list[Tensor]:
    """What a head reads of its target, at random: [N, d_model] each."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(N, made.D_MODEL, generator=generator) for _ in head.taps]


def guesses(head: Any) -> Tensor:
    """Logits and recurrence of a head that reads one row after another, over a text: [N, vocab + d_model]."""
    pages = Pages(head.needs)
    with torch.inference_mode():
        span = Span(0, text(7, N), 0, 0, N)
        found = pages.run(head.modules[0], head.fuse(streams(head, 1)), span)
    assert found[0][found[0].isfinite()].std() > 0.3, "logits must be large enough to show a difference"
    return torch.cat(found, -1)


def blocks(head: BlockDraft) -> tuple[Tensor, Tensor | None]:
    """Logits of a block behind a text, corrected, [n_drafts, vocab], and the estimate of acceptance."""
    ids, pages = text(8, N + 1), Pages(head.needs)
    previous = torch.tensor(text(9, head.n_drafts))  # [n_drafts]
    with torch.inference_mode():
        head.inject(pages.batch(Span(0, ids[:N], 0, 0, 0)), streams(head, 2), pages.store)
        found, hidden = head.run(pages.batch(block_at(head, 0, ids, N, head.n_drafts)), pages.store)
        return head.correct(found, previous), head.confidence(hidden, previous)


# --- prediction layers ---------------------------------------------------------------------------------------


def nextn_alone(contents: Contents) -> Contents:
    """What a converter writes if it is asked for the prediction layers alone."""
    ends = ("token_embd.", "output.", "output_norm.")
    n_layers = int(contents.metadata[f"{contents.architecture}.block_count"]) - 1
    kept = {
        name: one for name, one in contents.tensors.items() if name.startswith((f"blk.{n_layers}.", *ends))
    }
    return replace(contents, tensors=kept)


@pytest.mark.sampled(keep=2)
@pytest.mark.parametrize("family", MTP)
def test_prediction_layers(with_mtp: Callable[[str], Path], tmp_path: Path, family: str) -> None:
    """In the model's file and in a file of their own: the head of the folder."""
    folder = with_mtp(family)
    contents = gguf_of(folder)
    assert any(".nextn." in name for name in contents.tensors)
    path, alone = contents.write(tmp_path / "both.gguf"), nextn_alone(contents).write(tmp_path / "mtp.gguf")
    target, twin = loaded(folder), loaded(path)
    assert twin.config.n_layers == 4
    assert twin.n_params == target.n_params
    expected = guesses(load_mtp(folder, target, N_CTX))
    for of in (path, alone):
        assert torch.equal(guesses(load_mtp(of, target, N_CTX)), expected), of.name
    assert [kind_of(of) for of in (path, alone)] == ["draft-model", "draft-mtp"]
    assert load_mtp(alone, target, N_CTX).modules[0].embedding is target.decoder.embedding


@pytest.mark.parametrize("family", ["glm4_moe", "qwen3_5"])
def test_which_file_drafts(with_mtp: Callable[[str], Path], tmp_path: Path, family: str) -> None:
    contents = gguf_of(with_mtp(family))
    path, alone = contents.write(tmp_path / "both.gguf"), nextn_alone(contents).write(tmp_path / "mtp.gguf")
    target = Checkpoint(path, read_model(path), CPU, torch.float32)
    own, other = draft_source(None, target), draft_source(alone, target)
    assert own is not None
    assert other is not None
    assert (own.name, own.path, other.name, other.path) == ("draft-mtp", path, "draft-mtp", alone)
    settings = Settings(model=str(path))
    d_keys = contents.tensors["blk.4.attn_k.weight"].shape[0]  # type: ignore[union-attr]
    assert head_token_bytes(own, target, settings) == head_token_bytes(other, target, settings) == 8 * d_keys
    plain = gguf_of(tiny_checkpoint(family, tmp_path / "plain")).write(tmp_path / "plain.gguf")
    assert draft_source(None, Checkpoint(plain, read_model(plain), CPU, torch.float32)) is None


def test_prediction_layers_in_blocks(with_mtp: Callable[[str], Path], tmp_path: Path) -> None:
    contents = gguf_of(with_mtp("qwen3_5")).as_type("Q8_0")
    path, wide = contents.write(tmp_path / "blocks.gguf"), contents.widened().write(tmp_path / "wide.gguf")
    target = loaded(wide)
    ours, expected = (guesses(load_mtp(one, target, N_CTX)) for one in (path, wide))
    assert (ours - expected).abs().max() < 1e-4 * expected.abs().max()


# --- draft heads ---------------------------------------------------------------------------------------------

EAGLE = {
    **made.EAGLE3["SafeAILab"]["config"],
    "architectures": ["LlamaForCausalLMEagle3"],
    "head_dim": made.D_HEAD,
}


@pytest.fixture(scope="module")
def target(folder_of: Callable[[str], Path], _selected: None) -> Network:
    return loaded(folder_of("llama"))


@pytest.mark.parametrize("options", [{}, {"norm_before_residual": True, "norm_before_fc": True}], ids=str)
@pytest.mark.parametrize("n_draft_ids", [0, 100])
def test_eagle3(
    folder_of: Callable[[str], Path], target: Network, tmp_path: Path, n_draft_ids: int, options: Any
) -> None:
    tensors = made.eagle3("midlayer", 8, n_draft_ids=n_draft_ids)
    if options:
        tensors["input_norm.weight"] = made.Maker(1).scale(3 * made.D_MODEL)
    folder = made.write(tmp_path / "head", tensors, {**EAGLE, **options})
    path = gguf_of(folder, folder_of("llama")).write(tmp_path / "head.gguf")
    assert kind_of(path) == "draft-eagle3"
    ours, theirs = (NETWORKS["draft-eagle3"].load(of, target, N_CTX, NO_CHOICE) for of in (path, folder))  # type: ignore[misc]
    assert ours.taps == theirs.taps == (2, 3, 3)
    assert ours.n_params == theirs.n_params
    assert torch.equal(guesses(ours), guesses(theirs))


def test_hidden_states_that_a_file_names(
    folder_of: Callable[[str], Path], target: Network, tmp_path: Path
) -> None:
    config = {**EAGLE, "eagle_aux_hidden_state_layer_ids": [1, 4, 6]}
    folder = made.write(tmp_path / "head", made.eagle3("midlayer", 8), config)
    contents = gguf_of(folder, folder_of("llama"))
    load = NETWORKS["draft-eagle3"].load
    assert load is not None
    assert load(contents.write(tmp_path / "head.gguf"), target, N_CTX, NO_CHOICE).taps == (1, 4, 6)
    far = contents.with_keys({".target_layers": [1, 4, 9]}).write(tmp_path / "far.gguf")
    with pytest.raises(DraftMismatch, match=r"far\.gguf: hidden state 9 is asked for, the target has 0 to 7"):
        load(far, target, N_CTX, NO_CHOICE)


def test_heads_that_the_rows_do_not_make_up(
    folder_of: Callable[[str], Path], target: Network, tmp_path: Path
) -> None:
    folder = made.write(tmp_path / "head", made.eagle3("midlayer", 8), EAGLE)
    narrow = {".attention.key_length": 8, ".attention.value_length": 8}
    path = gguf_of(folder, folder_of("llama")).with_keys(narrow).write(tmp_path / "head.gguf")
    with pytest.raises(
        LoadError, match=r"tensor blk\.0\.attn_q\.weight has 64 rows, the heads of the file 32"
    ):
        NETWORKS["draft-eagle3"].load(path, target, N_CTX, NO_CHOICE)  # type: ignore[misc]


CASES = {
    "draft-dflash": (
        lambda: made.dflash(30, n_layers=3, n_taps=3),
        {**made.DFLASH_CONFIG, "head_dim": made.D_HEAD},
        (1, 3, 5),
    ),
    "draft-dspark": (
        lambda: made.dspark(31, n_layers=2, n_taps=2, rank=12),
        {**made.DSPARK_CONFIG, "head_dim": made.D_HEAD},
        (2, 5),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_block_drafts(folder_of: Callable[[str], Path], target: Network, tmp_path: Path, name: str) -> None:
    make, config, taps = CASES[name]
    folder = made.write(tmp_path / "head", make(), config)
    path = gguf_of(folder, folder_of("llama")).write(tmp_path / "head.gguf")
    assert kind_of(path) == kind_of(folder) == name
    ours, theirs = (NETWORKS[name].load(of, target, N_CTX, NO_CHOICE) for of in (path, folder))  # type: ignore[misc]
    assert ours.taps == theirs.taps == taps
    for key in ("block_size", "mask_id", "from_anchor", "n_params"):
        assert getattr(ours, key) == getattr(theirs, key), key
    for one, other in zip(blocks(ours), blocks(theirs), strict=True):
        assert one is other is None or torch.equal(one, other)  # type: ignore[arg-type]


# --- the same text with drafts -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Lab:
    """The demo as files: the target in one block type, what drafts for it in others."""
    scratch = tmp_path_factory.mktemp("files")
    kinds = {"target": "Q8_0", "draft": "Q4_0", "eagle3": "BF16", "dflash": "Q5_1"}
    files = {
        name: gguf_of(DEMO.target.with_name(name), None if name in ("target", "draft") else DEMO.target)
        .as_type(kind)
        .write(scratch / f"{name}.gguf")
        for name, kind in kinds.items()
    }
    heads = {f"draft-{name}": files[name] for name in ("eagle3", "dflash")}
    return Lab(Folders(files["target"], files["draft"], heads), torch.bfloat16)


@pytest.mark.sampled
@pytest.mark.parametrize("drafter", ["draft-model", "draft-eagle3", "draft-dflash"])
def test_text_is_that_of_plain_decoding(lab: Lab, drafter: str) -> None:
    cases = demo_cases(lab, "greedy", 3)
    expected = play(lab, Bench(), cases)
    found = disturbed(lab, Bench((drafter,), n_slots=2, adaptive=False), cases, expected, seed=0)
    assert found.n_accepted > 0
    assert found.n_wrong == 0


@pytest.mark.sampled(keep=2)
def test_a_model_whose_own_layers_draft(tmp_path: Path) -> None:
    hybrid = DEMO.target.with_name("hybrid")
    path = gguf_of(hybrid).as_type("Q8_0").write(tmp_path / "hybrid.gguf")
    lab = Lab(Folders(path, None, {"draft-mtp": path}), torch.bfloat16)
    cases = demo_cases(lab, "warm", 2)
    expected = play(lab, Bench(), cases)
    found = disturbed(lab, Bench(("draft-mtp",), n_slots=2, adaptive=False), cases, expected, seed=0)
    assert found.n_accepted > 0
    assert found.n_wrong == 0
