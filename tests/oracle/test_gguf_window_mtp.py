"""MTP layers of MiMo-V2-Flash and Step-3.5-Flash from GGUF files: beside the model and in a file of their own."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from slipstream.engine.checkpoint.gguf.files import GgufTensors
from slipstream.engine.models.heads.mtp import load_mtp
from slipstream.engine.speculate.registry import kind_of
from tests.gguf_files import Blocks
from tests.oracle.gguf_rounds import Made, drafted, joined, loaded, made, nextn_alone, said
from tests.oracle.head_rounds import N_CTX
from tests.oracle.test_gguf import check_blocks, logits

pytestmark = pytest.mark.usefixtures("_selected")
# Layers whose queries, keys and values a converter may join, and whether a layer reads what the one before it wrote.
KINDS = {"mimo": (9, False), "step": (8, True)}


@pytest.fixture(scope="module", params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def released(kind: str, tmp_path_factory: pytest.TempPathFactory) -> Made:
    return made(kind, tmp_path_factory.mktemp(kind))


@pytest.mark.sampled
def test_they_draft_as_the_folders(kind: str, released: Made, tmp_path: Path) -> None:
    path = released.contents.write(tmp_path / "both.gguf")
    alone = nextn_alone(released.contents).write(tmp_path / "mtp.gguf")
    assert [kind_of(of) for of in (path, alone)] == ["draft-model", "draft-mtp"]
    expected = said(load_mtp(released.folder, loaded(released.folder), N_CTX))
    for of in (path, alone):
        head = load_mtp(of, loaded(path), N_CTX)
        assert head.is_chained is KINDS[kind][1]
        assert torch.equal(said(head), expected), of.name
    rounds = drafted(released.folder, released.folder)
    assert all(n_drafted > 20 for _, n_drafted, _ in rounds)
    assert sum(n_kept for _, _, n_kept in rounds) > 0
    assert drafted(path, path) == drafted(path, alone) == rounds


@pytest.mark.sampled(keep=2)
@pytest.mark.parametrize("block", ["F32", "Q8_0"])
def test_joint_projections(kind: str, released: Made, tmp_path: Path, block: str) -> None:
    """As the converter's `--fuse-qkv` writes them, and llama.cpp wants them in MiMo's layers of prediction."""
    parts = released.contents.as_type(block) if block != "F32" else released.contents
    joint = joined(parts)
    assert len(joint.tensors) == len(parts.tensors) - 2 * KINDS[kind][0]
    path, apart = joint.write(tmp_path / "joint.gguf"), parts.write(tmp_path / "apart.gguf")
    assert set(GgufTensors(path).names) == set(GgufTensors(apart).names)
    assert torch.equal(logits(path), logits(apart))
    heads = [said(load_mtp(of, loaded(apart), N_CTX)) for of in (path, apart)]
    assert torch.equal(*heads)


def test_blocks(kind: str, released: Made, tmp_path: Path) -> None:
    contents = released.contents.as_type("Q8_0")
    assert kind == "mimo" or isinstance(contents.tensors["blk.1.attn_gate.weight"], Blocks)
    check_blocks(contents, tmp_path)
    target = loaded(tmp_path / "wide.gguf")
    ours, wide = (said(load_mtp(tmp_path / f"{one}.gguf", target, N_CTX)) for one in ("blocks", "wide"))
    assert (ours - wide).abs().max() < 1e-4 * wide.abs().max()
