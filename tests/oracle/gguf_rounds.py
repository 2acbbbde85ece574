"""Released checkpoints with MTP layers and their GGUF files: what the layers say and draft, read from either."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from slipstream.engine.api import Sampling
from slipstream.engine.batch import Span
from slipstream.engine.models.heads.mtp import Mtp
from slipstream.engine.models.network import Network
from slipstream.engine.models.registry import load_network
from tests.gguf_files import Blocks, Contents, gguf_of
from tests.oracle.head_rounds import CPU, N_CTX, VOCAB, Pages, text
from tests.oracle.lab import Bench, Case, Folders, Lab, play
from tests.oracle.window_heads import released_checkpoint

N = 40


@dataclass
class Made:
    """A released checkpoint with layers of prediction, and its file."""

    folder: Path
    contents: Contents


def made(family: str, folder: Path) -> Made:
    """family: as `released_checkpoint` names it."""
    released = released_checkpoint(family, folder)
    return Made(released, gguf_of(released))


def loaded(path: Path) -> Network:
    return load_network(path, torch.float32, CPU, N_CTX, VOCAB)


def nextn_alone(contents: Contents) -> Contents:
    """What a converter writes if it is asked for the layers of prediction alone: the same metadata, fewer tensors."""
    a = contents.architecture
    n_all, n = (int(contents.metadata[f"{a}.{key}"]) for key in ("block_count", "nextn_predict_layers"))
    kept = ("token_embd.", "output.", "output_norm.", *(f"blk.{i}." for i in range(n_all - n, n_all)))
    return replace(contents, tensors={k: v for k, v in contents.tensors.items() if k.startswith(kept)})


def model_alone(contents: Contents) -> Contents:
    """What it writes without them, in whose metadata there are none."""
    a = contents.architecture
    n_all, n = (int(contents.metadata[f"{a}.{key}"]) for key in ("block_count", "nextn_predict_layers"))
    left = {
        key: one[:-n] if isinstance(one, list) and len(one) == n_all else one
        for key, one in contents.metadata.items()
    }
    behind = tuple(f"blk.{i}." for i in range(n_all - n, n_all))
    tensors = {k: v for k, v in contents.tensors.items() if not k.startswith(behind)}
    found = replace(contents, metadata=left, tensors=tensors)
    return found.with_keys({".block_count": n_all - n, ".nextn_predict_layers": None})


def joined(contents: Contents) -> Contents:
    """With queries, keys and values of each layer one below the other."""
    changes: dict[str, Tensor | Blocks | None] = {}
    for i in range(int(contents.metadata[f"{contents.architecture}.block_count"])):
        names = [f"blk.{i}.attn_{one}.weight" for one in "qkv"]
        parts = [contents.tensors[name] for name in names]
        changes |= dict.fromkeys(names)
        if isinstance(parts[0], Blocks):
            data = np.concatenate([one.data for one in parts])  # type: ignore[union-attr]
            changes[f"blk.{i}.attn_qkv.weight"] = Blocks(parts[0].kind, data)
        else:
            changes[f"blk.{i}.attn_qkv.weight"] = torch.cat(parts)  # type: ignore[arg-type]
    return contents.with_tensors(changes)


def said(head: Mtp) -> Tensor:
    """Logits and recurrence of every layer over a text, [n_layers, N, vocab + d_model]."""
    pages, generator = Pages(head.needs), torch.Generator().manual_seed(1)
    found = []
    with torch.inference_mode():
        for i, module in enumerate(head.modules):
            hidden = torch.randn(N, head.d_model, generator=generator)
            found.append(torch.cat(pages.run(module, hidden, Span(0, text(7 + i, N), 0, 0, N)), -1))
    assert all(one.std() > 0.3 for one in found), "what is said must be large enough to show a difference"
    return torch.stack(found)


def drafted(target: Path, head: Path) -> list[tuple[list[int], int, int]]:
    """Of each text: its tokens, and how many guesses the head made and how many of them were kept."""
    lab = Lab(Folders(target, None, {"draft-mtp": head}), torch.float32, n_ctx=N_CTX)
    cases = [
        Case(tuple(text(i, 12 + 5 * i)), Sampling(seed=i, temperature=1.0), max_tokens=30) for i in range(3)
    ]
    played = play(lab, Bench(("draft-mtp",), adaptive=False), cases)
    done = {int(key): one.speculation for key, one in played.done.items()}
    return [(played.tokens[i], done[i].n_drafted, done[i].n_accepted) for i in sorted(done)]
