"""Random inputs for multi-head latent attention: rows written to pages, then read by all heads."""

from __future__ import annotations

import torch
from torch import Tensor

from slipstream.kernels.mla.op import (
    LatentNorm,
    LatentRope,
    head_linear,
    latent_attention,
    pack_heads,
    write_latents,
)
from slipstream.kernels.norm_rope_write.op import Rope
from tests.gpu.dice import Dice, Draw, Tensors, page_tensors, pages_of


def an_mla(dice: Dice) -> Draw:
    """All four ops in a row, as a layer calls them; what no row may see is NaN."""
    n_heads, d_latent, d_rope, d_plain, d_value = dice.random.choice(
        [(4, 32, 16, 24, 20), (5, 40, 8, 12, 16)]
        if dice.quick
        else [(16, 512, 64, 128, 128), (20, 512, 64, 192, 256), (64, 512, 64, 128, 128)]
    )
    lengths, past = dice.lengths()
    page_size, coded = dice.random.choice([16, 64]), dice.random.random() < 0.3
    interleaved, turned = dice.random.random() < 0.5, dice.random.random() < 0.8
    tensors = page_tensors(lengths, past, page_size, dice.g)
    n_pages, n_rows = int(tensors.pop("n_pages")), sum(lengths)
    seen = torch.zeros(n_pages, page_size, dtype=torch.bool)
    for i, (n, n_past) in enumerate(zip(lengths, past, strict=True)):
        at = torch.arange(n_past + n)
        seen[tensors["page_table"][i, at // page_size].long(), at % page_size] = True
    store = dice.normal(n_pages, page_size, d_latent + d_rope).masked_fill(~seen[..., None], float("nan"))
    angles = torch.arange(1300)[:, None] * 0.1 ** (torch.arange(d_rope // 2) / (d_rope // 2))
    tensors |= {"cos": angles.cos(), "sin": angles.sin()}
    tensors["weight"] = dice.normal(d_latent, dtype=dice.scale_dtype())
    tensors["q"], tensors["kv"] = (
        dice.normal(n_rows, n_heads, d_plain + d_rope),
        dice.normal(n_rows, d_latent + d_rope),
    )
    tensors["keys"] = dice.normal(n_heads, d_latent, d_plain) / d_plain**0.5
    tensors["values"] = dice.normal(n_heads, d_value, d_latent) / d_latent**0.5
    tensors["mixed"], tensors["rotated"] = (
        dice.normal(n_rows, n_heads, d_latent),
        dice.normal(n_rows, n_heads, d_rope),
    )
    tensors["latents"] = as_float8(store).to(dice.dtype) if coded else store

    def call(t: Tensors) -> tuple[Tensor, ...]:
        rope = LatentRope(Rope(t["cos"], t["sin"]) if turned else None, interleaved)
        latents = as_float8(t["latents"]) if coded else t["latents"]
        said = latent_attention(t["mixed"], t["rotated"], latents, pages_of(t), (d_plain + d_rope) ** -0.5)
        absorbed = head_linear(t["q"][..., :d_plain], pack_heads(t["keys"]))
        out = head_linear(t["mixed"], pack_heads(t["values"]))
        written = torch.zeros_like(t["latents"])
        q_rope = write_latents(t["q"], t["kv"], LatentNorm(t["weight"], 1e-6), rope, pages_of(t), written)
        return said, absorbed, out, q_rope, written

    says = f"rows {lengths} after {past}, {n_heads} heads, latents {d_latent} + {d_rope}, page {page_size}"
    return Draw(tensors, call, f"{says}, float8 {coded}, rotated {turned}, interleaved {interleaved}")


def as_float8(x: Tensor) -> Tensor:
    return x.clamp(-448, 448).to(torch.float8_e4m3fn)
