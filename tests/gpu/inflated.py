"""The demo pair at the size of real models, built straight into device memory: the text stays the demo's."""

from __future__ import annotations

import contextlib
import json
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from engine.layers.decoder import load_decoder
from engine.models.network import Network
from engine.models.registry import decoder_spec, read_model
from engine.text.grammar import Grammars
from engine.text.tokenizer import Tokenizer
from tests.bench.inflate_dense import Entry, Inflation
from tests.oracle.lab import DEMO, Lab

# Llama-3 8B with Qwen's vocabulary, and a draft of a tenth of it.
TARGET = {
    "hidden": 4096,
    "layers": 32,
    "ffn": 14336,
    "heads": 32,
    "kv_heads": 8,
    "head_dim": 128,
    "vocab": 151_936,
}
DRAFT = {
    "hidden": 2048,
    "layers": 8,
    "ffn": 6144,
    "heads": 16,
    "kv_heads": 8,
    "head_dim": 64,
    "vocab": 151_936,
}
SMALL_TARGET = {"hidden": 1024, "layers": 6, "ffn": 640, "vocab": 5000}
SMALL_DRAFT = {"hidden": 512, "layers": 3, "vocab": 5000}


@dataclass
class InflatedSource:
    """What layers are built from: every tensor is made when it is taken, on the device."""

    inflation: Inflation
    dtype: torch.dtype
    device: torch.device
    n_params: int = 0
    entries: dict[str, Entry] = field(init=False)

    def __post_init__(self) -> None:
        self.entries = {one.name: one for one in self.inflation.entries()}

    def __contains__(self, name: str) -> bool:
        return name in self.entries

    def take(self, name: str, shape: Sequence[int], dtype: torch.dtype | None = None) -> Tensor:
        """The tensor of that name and shape; each may be taken once."""
        entry = self.entries.pop(name)
        with on(self.device):
            made = entry.make().to(dtype or self.dtype)
        assert tuple(made.shape) == tuple(shape), f"{name}: {tuple(made.shape)} is not {tuple(shape)}"
        self.n_params += made.numel()
        return made

    def drop_copy(self, name: str, original: Tensor) -> bool:
        """A tied head needs no tensor of its own."""
        return self.entries.pop(name, None) is not None


def on(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Tensors that are made without a word about where are made there."""
    return device if device.type != "cpu" else contextlib.nullcontext()


def inflated(
    folder: Path, sizes: dict[str, int], dtype: torch.dtype, device: torch.device, n_ctx: int
) -> Network:
    """The checkpoint in `folder` at other sizes. `kernels.select` must have run for the device and dtype."""
    config = json.loads((folder / "config.json").read_text())
    weights = {name: one.to(device) for name, one in load_file(folder / "model.safetensors").items()}
    with on(device):
        old = Inflation.read_shape(config)
        inflation = Inflation(config, weights, replace(old, **sizes), seed=0)
    inflation.generator = torch.Generator(device).manual_seed(0)
    with tempfile.TemporaryDirectory() as scratch:
        (Path(scratch) / "config.json").write_text(json.dumps(inflation.new_config()))
        told = read_model(scratch)
    source = InflatedSource(inflation, dtype, device)
    decoder = load_decoder(source, decoder_spec(told, n_ctx))
    assert not source.entries, f"tensors that no layer takes: {', '.join(source.entries)}"
    return Network(
        config=told, decoder=decoder, n_params=source.n_params, dtype=dtype, device=device, n_ctx=n_ctx
    )


class InflatedLab(Lab):
    """The bench of the losslessness suite over the inflated pair."""

    def __init__(self, dtype: torch.dtype, device: torch.device, n_ctx: int, *, small: bool) -> None:
        self.folders, self.n_ctx, self._heads = DEMO, n_ctx, {}
        self.tokenizer = Tokenizer(DEMO.target)
        self.target = inflated(DEMO.target, SMALL_TARGET if small else TARGET, dtype, device, n_ctx)
        self.draft = inflated(DEMO.draft, SMALL_DRAFT if small else DRAFT, dtype, device, n_ctx + 64)
        self.grammars = Grammars(self.tokenizer, self.target.vocab_size)
