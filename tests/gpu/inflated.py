"""The demo at the size of real models, built straight into device memory: the text stays the demo's."""

from __future__ import annotations

import contextlib
import json
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from slipstream.engine.layers.decoder import load_decoder
from slipstream.engine.models.heads.mtp import Mtp, found_layers, load_layer, plan_of
from slipstream.engine.models.network import Network
from slipstream.engine.models.registry import decoder_spec, read_model
from slipstream.engine.ranks import ALONE, Joint, Ranks
from slipstream.engine.text.grammar.grammars import Grammars
from slipstream.engine.text.tokenizer import Tokenizer
from slipstream.kernels.matmul.blocks import BlockWeight
from tests.bench.inflate import INFLATIONS
from tests.bench.inflate_dense import Entry, Inflation
from tests.bench.models import Model, Sizes
from tests.oracle.lab import Lab

MTP = "mtp."  # how the tensors of a hybrid's own head begin


@dataclass
class InflatedSource:
    """What layers are built from: every tensor is made when it is taken, on the device."""

    inflation: Inflation
    dtype: torch.dtype
    device: torch.device
    n_params: int = 0
    folder: Path = Path("memory")  # for messages
    ranks: Ranks = ALONE
    entries: dict[str, Entry] = field(init=False)
    shapes: dict[str, tuple[int, ...]] = field(init=False)

    def __post_init__(self) -> None:
        self.entries = {one.name: one for one in self.inflation.entries()}
        self.shapes = {name: one.shape for name, one in self.entries.items()}

    def __contains__(self, name: str) -> bool:
        return name in self.shapes

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self.shapes)

    def shape(self, name: str) -> tuple[int, ...]:
        return self.shapes[name]

    def take(
        self, name: str, shape: Sequence[int], dtype: torch.dtype | None = None, joint: Joint | None = None
    ) -> Tensor:
        """The tensor of that name and shape; each may be taken once."""
        entry = self.entries.pop(name)
        with on(self.device):
            made = entry.make().to(dtype or self.dtype)
        assert tuple(made.shape) == tuple(shape), f"{name}: {tuple(made.shape)} is not {tuple(shape)}"
        self.n_params += made.numel()
        return made

    def take_linear(
        self, names: Sequence[str], d_in: int, d_outs: Sequence[int], joint: Sequence[int] = ()
    ) -> Tensor:
        """The matrices `name.weight` [d_out, d_in], one below the other."""
        parts = [self.take(f"{name}.weight", (n, d_in)) for name, n in zip(names, d_outs, strict=True)]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def take_matrix(self, name: str, shape: tuple[int, int], *, for_rows: bool = True) -> Tensor:
        """The matrix of that name."""
        return self.take(name, shape)

    def take_tied(self, name: str, original: Tensor | BlockWeight) -> Tensor | BlockWeight:
        """That matrix itself."""
        return original

    def take_expert(self, name: str, shape: tuple[int, int]) -> Tensor:
        """The same."""
        return self.take(name, shape)

    def drop_copy(self, name: str, original: Tensor | BlockWeight) -> bool:
        """A tied head needs no tensor of its own."""
        return self.entries.pop(name, None) is not None


def on(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Tensors that are made without a word about where are made there."""
    return device if device.type != "cpu" else contextlib.nullcontext()


def inflation_of(folder: Path, sizes: Sizes, device: torch.device) -> Inflation:
    """The plan for the checkpoint in `folder` at other sizes; its tensors are made on the device."""
    config = json.loads((folder / "config.json").read_text())
    weights = {name: one.to(device) for name, one in load_file(folder / "model.safetensors").items()}
    kind = INFLATIONS[config["architectures"][0]]
    with on(device):
        inflation = kind(config, weights, replace(kind.read_shape(config), **sizes), seed=0)
    inflation.generator = torch.Generator(device).manual_seed(0)
    return inflation


def inflated(
    folder: Path, sizes: Sizes, dtype: torch.dtype, device: torch.device, n_ctx: int
) -> tuple[Network, InflatedSource]:
    """The checkpoint in `folder` at other sizes, and what is left of its tensors, which is a head's.

    `kernels.select` must have run for the device and dtype.
    """
    inflation = inflation_of(folder, sizes, device)
    with tempfile.TemporaryDirectory() as scratch:
        (Path(scratch) / "config.json").write_text(json.dumps(inflation.new_config()))
        told = read_model(scratch)
    source = InflatedSource(inflation, dtype, device)
    spec = decoder_spec(told, n_ctx)
    decoder = load_decoder(source, spec)
    left = [name for name in source.entries if not name.startswith(MTP)]
    assert not left, f"tensors that no layer takes: {', '.join(left)}"
    network = Network(
        config=told,
        spec=spec,
        decoder=decoder,
        n_params=source.n_params,
        weight_bytes=source.n_params * dtype.itemsize,
        dtype=dtype,
        device=device,
        n_ctx=n_ctx,
    )
    return network, source


def inflated_mtp(source: Any, target: Network, n_ctx: int) -> Mtp:
    """The head among a hybrid's own tensors (`engine.models.heads.mtp.load_mtp`)."""
    before = source.n_params
    ((names, _),) = found_layers(source.names, target.config.n_layers)
    plan = plan_of(source, names, target, n_ctx)
    layer = load_layer(source, names, plan, target, 0, recycle_normed=True)
    assert not source.entries, f"tensors that no layer takes: {', '.join(source.entries)}"
    return Mtp(
        taps=(target.config.n_layers + 1,),
        d_model=plan.d_model,
        is_chained=True,
        modules=[layer],
        n_params=source.n_params - before,
    )


class InflatedLab(Lab):
    """The bench of the losslessness suite over an inflated pair, and over the target's own head if it has one."""

    def __init__(self, model: Model, dtype: torch.dtype, device: torch.device, n_ctx: int) -> None:
        assert model.source.draft is not None
        self.n_ctx, self._heads = n_ctx, {}
        self.tokenizer = Tokenizer(model.source.target)
        self.target, source = inflated(model.source.target, model.target, dtype, device, n_ctx)
        self.draft, _ = inflated(model.source.draft, model.draft, dtype, device, n_ctx + 64)
        if source.entries:
            self._heads["draft-mtp"] = inflated_mtp(source, self.target, n_ctx + 64)
        self.folders = replace(model.source, heads=dict.fromkeys(self._heads, model.source.target))
        self.grammars = Grammars(self.tokenizer, self.target.vocab_size)
