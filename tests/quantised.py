"""Quantised copies of checkpoints, encoded from the definitions of the formats with whole-number arithmetic on words.

Beside each copy stands its dense twin: the values that the codes mean, worked out where they are made.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

# What follows a layer's name -> tensor; and the values that they mean, [out, in] float32.
Encoded = tuple[dict[str, Tensor], Tensor]
LINEAR = re.compile(r"\.(\w+_proj(_\w+)?|fc|eh_proj)\.weight$")
DENSE = re.compile(r"\.(in_proj_[ab]+)\.weight$|^(model\.)?(visual|vision_tower|multi_modal_projector)\.")
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # which of eight columns lies in the i-th four bits of a word


@dataclass(frozen=True)
class Coding:
    """A format: its config, and how one matrix [out, in] is written."""

    config: dict[str, Any]
    encode: Callable[[Tensor, torch.Generator], Encoded]
    more: Mapping[str, Any] = field(default_factory=dict)


def write_quantised(source: Path, folder: Path, coding: Coding, seed: int = 3) -> tuple[Path, Path]:
    """(quantised copy, dense twin) of a checkpoint of one file; embeddings, norms, routers stay as they are."""
    generator = torch.Generator().manual_seed(seed)
    narrow, dense = {}, {}
    for name, tensor in load_file(source / "model.safetensors").items():
        narrow[name] = dense[name] = tensor
        if tensor.dim() == 2 and LINEAR.search(name) and not DENSE.search(name):
            del narrow[name]
            pieces, dense[name] = coding.encode(tensor.float(), generator)
            layer = name.removesuffix(".weight")
            narrow.update({f"{layer}.{piece}": one for piece, one in pieces.items()})
    config = json.loads((source / "config.json").read_text())
    for path, tensors, more in (
        (folder / "narrow", narrow, {"quantization_config": coding.config}),
        (folder / "dense", dense, {}),
    ):
        shutil.copytree(source, path)
        save_file({name: one.contiguous() for name, one in tensors.items()}, path / "model.safetensors")
        (path / "config.json").write_text(json.dumps({**config, **more}))
    return folder / "narrow", folder / "dense"


def words(codes: Tensor, order: tuple[int, ...] = (0, 1, 2, 3, 4, 5, 6, 7)) -> Tensor:
    """[rows, n] whole numbers below 16 -> [rows, n / 8] int32; order[i]: of eight, who lies in the i-th four bits."""
    eights = codes.to(torch.int64).view(codes.shape[0], -1, 8)  # [rows, n / 8, 8]
    total = sum(eights[:, :, one] * 16**i for i, one in enumerate(order))
    return torch.where(total >= 2**31, total - 2**32, total).to(torch.int32)


def rounded(
    matrix: Tensor, n_group: int, group_of: Tensor | None = None, *, symmetric: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(codes [out, in], scales [out, groups] float16, zeros [out, groups], values [out, in] float32)."""
    n_out, n_in = matrix.shape
    group_of = torch.arange(n_in) // n_group if group_of is None else group_of
    codes, values = torch.zeros(n_out, n_in, dtype=torch.int64), torch.zeros(n_out, n_in)
    scales = torch.zeros(n_out, n_in // n_group, dtype=torch.float16)
    zeros = torch.full(scales.shape, 8, dtype=torch.int64)
    for g in range(n_in // n_group):
        columns = group_of == g
        part = matrix[:, columns]
        low, high = part.amin(1).clamp(max=0), part.amax(1).clamp(min=0)
        spread = torch.maximum(-low, high) / 7.5 if symmetric else (high - low) / 15
        scales[:, g] = (spread + 1e-6).half()
        scale = scales[:, g].float()
        if not symmetric:
            zeros[:, g] = (-low / scale).round().clamp(0, 15).long()
        zero = zeros[:, g, None]
        codes[:, columns] = ((part / scale[:, None]).round().long() + zero).clamp(0, 15)
        values[:, columns] = (codes[:, columns] - zero).float() * scale[:, None]
    return codes, scales, zeros, values


def awq(n_group: int) -> Coding:
    """n_group: -1 for all inputs."""

    def encode(matrix: Tensor, generator: torch.Generator) -> Encoded:
        n = matrix.shape[1] if n_group < 0 else n_group
        codes, scales, zeros, values = rounded(matrix, n, symmetric=False)
        return {
            "qweight": words(codes.t(), AWQ_ORDER),
            "qzeros": words(zeros.t(), AWQ_ORDER),
            "scales": scales.t(),
        }, values

    config = {"quant_method": "awq", "bits": 4, "group_size": n_group, "zero_point": True, "version": "gemm"}
    return Coding({**config, "modules_to_not_convert": ["in_proj_a", "in_proj_b", "fc"]}, encode)


def gptq(n_group: int, *, symmetric: bool, shuffled: bool = False, version: str = "gptq") -> Coding:
    """shuffled: act-order, each matrix of as many inputs in the same order."""

    def encode(matrix: Tensor, generator: torch.Generator) -> Encoded:
        n_out, n_in = matrix.shape
        n = n_in if n_group < 0 else n_group
        group_of = torch.arange(n_in) // n
        if shuffled:
            group_of = group_of[torch.randperm(n_in, generator=torch.Generator().manual_seed(n_in))]
        matrix = torch.cat((matrix[:1].abs(), matrix[1:]))  # its zeros are 0, which version 1 stores as 15
        codes, scales, zeros, values = rounded(matrix, n, group_of, symmetric=symmetric)
        stored = (zeros - 1) % 16 if version == "gptq" else zeros
        pieces = {
            "qweight": words(codes).t(),
            "qzeros": words(stored.t()),
            "scales": scales.t(),
            "g_idx": group_of.to(torch.int32),
            "bias": torch.zeros(n_out, dtype=torch.float16),
        }
        return pieces, values

    config = {
        "quant_method": "gptq",
        "bits": 4,
        "group_size": n_group,
        "sym": symmetric,
        "desc_act": shuffled,
    }
    return Coding({**config, "checkpoint_format": version}, encode)


def compressed_int4(n_group: int, *, symmetric: bool, shuffled: bool = False) -> Coding:
    def encode(matrix: Tensor, generator: torch.Generator) -> Encoded:
        n_out, n_in = matrix.shape
        n = n_in if n_group < 0 else n_group
        group_of = torch.arange(n_in) // n
        if shuffled:
            group_of = group_of[torch.randperm(n_in, generator=generator)]
        codes, scales, zeros, values = rounded(matrix, n, group_of, symmetric=symmetric)
        pieces = {
            "weight_packed": words(codes),
            "weight_scale": scales,
            "weight_shape": torch.tensor([n_out, n_in]),
        }
        if not symmetric:
            pieces["weight_zero_point"] = words(zeros.t()).t()
        if shuffled:
            pieces["weight_g_idx"] = group_of.to(torch.int32)
        return pieces, values

    strategy = {"strategy": "channel"} if n_group < 0 else {"strategy": "group", "group_size": n_group}
    return compressed(
        "pack-quantized", {"num_bits": 4, "type": "int", "symmetric": symmetric, **strategy}, encode
    )


def compressed_int8(strategy: str, n_group: int = 0, *, packed: bool = False) -> Coding:
    """Numbers from -128 on. packed: four in a word."""

    def encode(matrix: Tensor, generator: torch.Generator) -> Encoded:
        n_out, n_in = matrix.shape
        block = {"tensor": (n_out, n_in), "channel": (1, n_in), "group": (1, n_group)}[strategy]
        parts = matrix.view(n_out // block[0], block[0], n_in // block[1], block[1])
        scales = parts.abs().amax((1, 3)) / 127.5  # [blocks of outputs, of inputs]
        codes = (parts / scales[:, None, :, None]).round().clamp(-128, 127)
        values = (codes * scales[:, None, :, None]).view(n_out, n_in)
        whole = codes.view(n_out, n_in).to(torch.int8)
        if not packed:
            return {"weight": whole, "weight_scale": scales[0] if strategy == "tensor" else scales}, values
        fours = (whole.to(torch.int64) + 128).view(n_out, -1, 4)
        total = sum(fours[:, :, i] * 256**i for i in range(4))
        pieces = {
            "weight_packed": torch.where(total >= 2**31, total - 2**32, total).to(torch.int32),
            "weight_scale": scales,
            "weight_shape": torch.tensor([n_out, n_in]),
        }
        return pieces, values

    weights = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": strategy}
    weights |= {"group_size": n_group} if strategy == "group" else {}
    return compressed("pack-quantized" if packed else "int-quantized", weights, encode)


def compressed(form: str, weights: dict[str, Any], encode: Any, inputs: Any = None) -> Coding:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    config = {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head", "re:.*mlp.gate$", "re:.*in_proj_[ab]+$"],
        "kv_cache_scheme": None,
    }
    return Coding(config, encode)


def fp8_blocks(matrix: Tensor, block: tuple[int, int]) -> tuple[Tensor, Tensor, Tensor]:
    """(codes [out, in] float8_e4m3fn, scales [row blocks, column blocks] float32, values [out, in] float32)."""
    n_out, n_in = matrix.shape
    codes, values = torch.zeros(n_out, n_in, dtype=torch.float8_e4m3fn), torch.zeros(n_out, n_in)
    scales = torch.zeros(-(-n_out // block[0]), -(-n_in // block[1]))
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            here = slice(i * block[0], (i + 1) * block[0]), slice(j * block[1], (j + 1) * block[1])
            scales[i, j] = matrix[here].abs().max() / 448
            codes[here] = (matrix[here] / scales[i, j]).clamp(-448, 448).to(torch.float8_e4m3fn)
            values[here] = codes[here].float() * scales[i, j]
    return codes, scales, values


def fp8(block: tuple[int, int]) -> Coding:
    def encode(matrix: Tensor, generator: torch.Generator) -> Encoded:
        codes, scales, values = fp8_blocks(matrix, block)
        return {"weight": codes, "weight_scale_inv": scales}, values

    config = {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "weight_block_size": list(block),
        "activation_scheme": "dynamic",
    }
    return Coding({**config, "modules_to_not_convert": ["lm_head", "in_proj_a", "in_proj_b"]}, encode)


def fp8_whole() -> Coding:
    """One scale a matrix, and one of its inputs, which nothing is made of."""

    def encode(matrix: Tensor, generator: torch.Generator) -> Encoded:
        codes, scales, values = fp8_blocks(matrix, tuple(matrix.shape))
        return {"weight": codes, "weight_scale": scales[0, 0], "input_scale": torch.tensor(0.5)}, values

    return Coding(
        {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"]}, encode
    )


def fp8_whole_of_transformers() -> Coding:
    """The same in the names of transformers, as Mistral's files have them beside a tower that is not rounded."""

    def encode(matrix: Tensor, generator: torch.Generator) -> Encoded:
        codes, scales, _ = fp8_blocks(matrix, tuple(matrix.shape))
        return {
            "weight": codes,
            "weight_scale_inv": scales[0, 0].bfloat16(),
            "activation_scale": torch.tensor(0.5, dtype=torch.bfloat16),
        }, codes.float() * scales[0, 0].bfloat16().float()

    config = {
        "quant_method": "fp8",
        "activation_scheme": "static",
        "weight_block_size": None,
        "modules_to_not_convert": ["model.vision_tower", "model.multi_modal_projector", "lm_head"],
    }
    return Coding(config, encode)


def compressed_fp8(strategy: str) -> Coding:
    def encode(matrix: Tensor, generator: torch.Generator) -> Encoded:
        n_out, n_in = matrix.shape
        block = {"tensor": (n_out, n_in), "channel": (1, n_in), "block": (32, 48)}[strategy]
        codes, scales, values = fp8_blocks(matrix, block)
        return {"weight": codes, "weight_scale": scales[0] if strategy == "tensor" else scales}, values

    weights = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": strategy}
    if strategy == "block":
        weights["block_structure"] = [32, 48]
    return compressed("float-quantized", weights, encode, {"num_bits": 8, "type": "float", "dynamic": True})
