"""A draft model whose ids are another permutation of the same tokens, some of them missing."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from slipstream.engine.batch import Batch, Span
from slipstream.engine.cache.need import Sizes
from slipstream.engine.cache.store import Store
from slipstream.engine.errors import DraftMismatch
from slipstream.engine.models.registry import load_network
from slipstream.engine.models.translated import shared_tokens, translate
from slipstream.engine.service.start.launch import launch
from slipstream.engine.settings import Settings
from slipstream.engine.text.tokenizer import Tokenizer, by_id
from slipstream.kernels import select

DEMO = Path(__file__).parents[2] / "demo"
CPU = torch.device("cpu")
N_GONE = 40  # tokens renamed, so that the draft has not got them


def permuted_draft(folder: Path, n_gone: int = N_GONE) -> torch.Tensor:
    """The demo's draft with its ids shuffled; returns the old id of each new one, [vocab] int64."""
    shutil.copytree(DEMO / "draft", folder)
    tensors = load_file(folder / "model.safetensors")
    embedding = tensors["model.embed_tokens.weight"]
    old_ids = torch.randperm(len(embedding), generator=torch.Generator().manual_seed(0))
    tensors["model.embed_tokens.weight"] = embedding[old_ids].contiguous()
    save_file(tensors, folder / "model.safetensors")
    new_ids = torch.argsort(old_ids).tolist()
    told = json.loads((folder / "tokenizer.json").read_text())
    merged = {
        part
        for merge in told["model"]["merges"]
        for part in (merge if isinstance(merge, list) else merge.split())
    }
    results = {"".join(m if isinstance(m, list) else m.split()) for m in told["model"]["merges"]}
    gone = sorted(results - merged)[:n_gone]
    told["model"]["merges"] = [
        m
        for m in told["model"]["merges"]
        if "".join(m if isinstance(m, list) else m.split()) not in set(gone)
    ]
    vocab = {
        f"gone {token}" if token in set(gone) else token: new_ids[i]
        for token, i in told["model"]["vocab"].items()
    }
    told["model"]["vocab"] = vocab
    for one in told["added_tokens"]:
        one["id"] = new_ids[one["id"]]
    (folder / "tokenizer.json").write_text(json.dumps(told))
    return old_ids


def test_logits_are_those_of_the_same_tokens(tmp_path: Path) -> None:
    permuted_draft(tmp_path / "draft")
    select(CPU, torch.float32)
    ours, theirs = Tokenizer(DEMO / "target"), Tokenizer(tmp_path / "draft")
    plain = load_network(DEMO / "draft", torch.float32, CPU, 64, ours.vocab_size)
    shuffled = load_network(tmp_path / "draft", torch.float32, CPU, 64, theirs.vocab_size)
    network = translate(shuffled, by_id(ours), by_id(theirs), ours.vocab_size)
    known = sorted(shared_tokens(by_id(ours), by_id(theirs)))
    assert len(known) == ours.vocab_size - N_GONE
    sizes = Sizes(n_slots=1, n_pages=1, page_size=64)
    batch = Batch.build([Span(0, known[100:140], 0, 0, 3)], [[0]], 64, CPU)
    with torch.inference_mode():
        logits = [one.forward(batch, Store(one.needs, sizes, torch.float32, CPU)) for one in (plain, network)]
    assert torch.equal(logits[0][:, known], logits[1][:, known])
    unknown = sorted(set(range(ours.vocab_size)) - set(known))
    assert torch.isinf(logits[1][:, unknown]).all()


def test_a_draft_with_too_few_tokens_in_common_is_refused_by_share(tmp_path: Path) -> None:
    permuted_draft(tmp_path / "draft", n_gone=0)
    told = json.loads((tmp_path / "draft" / "tokenizer.json").read_text())
    vocab = told["model"]["vocab"]
    kept = {
        part
        for merge in told["model"]["merges"][:300]
        for part in (merge if isinstance(merge, list) else merge.split())
    }
    told["model"]["merges"] = told["model"]["merges"][:300]
    made = {"".join(m if isinstance(m, list) else m.split()) for m in told["model"]["merges"]}
    told["model"]["vocab"] = {
        token if len(token) == 1 or token in kept | made else f"other {token}": i
        for token, i in vocab.items()
    }
    (tmp_path / "draft" / "tokenizer.json").write_text(json.dumps(told))
    with pytest.raises(DraftMismatch, match=r"has 1\d% of the target's 4096 tokens, at least 50%"):
        launch(
            Settings(model=str(DEMO / "target"), model_draft=str(tmp_path / "draft"), ctx_size=256, threads=1)
        )
