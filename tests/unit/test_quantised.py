"""What a config says of quantised weights, by key and value; matrices of few bits, joined without changing a value."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from slipstream.engine.checkpoint.byte_layouts import Fp8, Int8, PackedInt8
from slipstream.engine.checkpoint.layouts import Awq, Gptq, Mxfp4, PackedInt4, Scheme
from slipstream.engine.errors import UnsupportedModel
from slipstream.engine.models.reading.fields import Fields
from slipstream.engine.models.reading.quantization import read_scheme
from slipstream.engine.service.tools.forecast import forecast
from slipstream.engine.settings import Settings
from slipstream.kernels.matmul.quantized import ByteWeight, Int4Weight, Quantized, joined, widened
from tests import quantised
from tests.public_configs import CONFIGS, PARAMETERS


def scheme(config: dict[str, Any], key: str = "quantization_config") -> Scheme:
    found = read_scheme(Fields({key: config}, "config.json"))
    assert found is not None
    return found


AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True}
FP8 = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
INT4 = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 128}
CHANNEL = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel"}


def packed(
    weights: dict[str, Any] | None = None, form: str = "pack-quantized", **more: Any
) -> dict[str, Any]:
    groups = {"group_0": {"targets": ["Linear"], "weights": {**INT4, **(weights or {})}}}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": groups,
        "ignore": ["lm_head"],
        **more,
    }


def integers(**weights: Any) -> dict[str, Any]:
    return packed({**CHANNEL, "type": "int", **weights}, "int-quantized")


def floats(**weights: Any) -> dict[str, Any]:
    return packed({**CHANNEL, **weights}, "float-quantized")


@pytest.mark.parametrize(
    ("config", "layout"),
    [
        (AWQ, Awq(128)),
        ({"quant_method": "awq", "w_bit": 4, "q_group_size": -1, "version": "GEMM"}, Awq(None)),
        (GPTQ, Gptq(128, shuffled=False, zero_shift=1)),
        ({**GPTQ, "desc_act": True, "checkpoint_format": "gptq_v2"}, Gptq(128, shuffled=True, zero_shift=0)),
        (FP8, Fp8((128, 128))),
        ({"quant_method": "fp8"}, Fp8(None)),
        ({"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}, Mxfp4()),
        (packed(), PackedInt4(128, symmetric=True)),
        (
            packed({"strategy": "channel", "group_size": None, "symmetric": False}),
            PackedInt4(None, symmetric=False),
        ),
        (packed({"num_bits": 8}), PackedInt8(128)),
        (packed({"num_bits": 8, "strategy": "channel"}), PackedInt8(None)),
        (integers(), Int8()),
        (integers(strategy="tensor"), Int8()),
        (floats(), Fp8(None)),
        (floats(strategy="tensor"), Fp8(None)),
        (floats(strategy="block", block_structure=[128, 128]), Fp8((128, 128))),
    ],
)
def test_layouts(config: dict[str, Any], layout: object) -> None:
    assert [group.layout for group in scheme(config).groups] == [layout]
    assert scheme(config, "compression_config") == scheme(config)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"quant_method": "bitsandbytes"}, 'quant_method = "bitsandbytes": must be one of fp8, awq, gptq'),
    ({"bits": 4}, "quant_method is missing"),
    ({**AWQ, "bits": 8}, "bits = 8: must be 4"),
    ({**AWQ, "bits": True}, "bits = true"),
    ({**AWQ, "version": "gemv"}, 'version = "gemv"'),
    ({**AWQ, "zero_point": False}, "zero_point = false: must be true"),
    ({**AWQ, "group_size": 0}, "group_size = 0"),
    ({**AWQ, "modules_to_not_convert": "lm_head"}, "modules_to_not_convert"),
    ({**GPTQ, "bits": 3}, "bits = 3"),
    ({**GPTQ, "checkpoint_format": "marlin"}, 'checkpoint_format = "marlin": must be one of gptq, gptq_v2'),
    ({**GPTQ, "is_marlin_format": True}, "is_marlin_format = true"),
    ({**GPTQ, "dynamic": {"+:.*down.*": {"bits": 8}}}, "dynamic"),
    ({**GPTQ, "desc_act": 1}, "desc_act = 1"),
    ({**FP8, "fmt": "e5m2"}, 'fmt = "e5m2": must be e4m3'),
    ({**FP8, "weight_block_size": [128]}, "weight_block_size"),
    (packed({"num_bits": 3}), "num_bits = 3: must be 4 or 8"),
    (packed({"num_bits": 8, "symmetric": False}), "symmetric = false: must be true"),
    (integers(num_bits=4), "num_bits = 4: must be 8"),
    (integers(symmetric=False), "symmetric = false: must be true"),
    (integers(strategy="group"), 'strategy = "group": must be one of tensor, channel'),
    (packed({"type": "float"}), 'type = "float": must be int'),
    (packed({"strategy": "tensor"}), 'strategy = "tensor": must be one of group, channel'),
    (
        packed(form="nvfp4-pack-quantized"),
        'format = "nvfp4-pack-quantized": must be one of float-quantized, int-quantized, pack-quantized',
    ),
    (packed(kv_cache_scheme={"num_bits": 8}), "kv_cache_scheme"),
    (packed(transform_config={"config_groups": {"R1": {}}}), "transform_config"),
    (packed(sparsity_config={"format": "sparse-24-bitmask"}), "sparsity_config"),
    (packed(config_groups={}), "config_groups"),
    (floats(num_bits=4), "num_bits = 4"),
    (floats(strategy="token"), 'strategy = "token"'),
    (floats(strategy="block"), "block_structure = null"),
]


@pytest.mark.parametrize(("config", "told"), REFUSED)
def test_what_is_not_supported_is_refused_by_name(config: dict[str, Any], told: str) -> None:
    with pytest.raises(UnsupportedModel) as caught:
        scheme(config)
    assert told in str(caught.value)
    assert str(caught.value).startswith("config.json: quantization_config")


def test_which_layers_a_config_means() -> None:
    config = packed(
        ignore=["lm_head", "re:.*mlp[.]gate$", "model.language_model.layers.1.self_attn.o_proj", "visual"]
    )
    config["config_groups"]["group_1"] = {
        "targets": ["re:.*down_proj$"],
        "weights": CHANNEL,
        "format": "float-quantized",
    }
    config["config_groups"]["group_0"]["targets"] = ["re:.*(up|gate|o)_proj$"]
    told = scheme(config)
    expected = {
        "lm_head": None,
        "model.layers.0.mlp.gate": None,
        "model.layers.1.self_attn.o_proj": None,
        "model.layers.11.self_attn.o_proj": PackedInt4,
        "model.layers.1.mlp.gate_proj": PackedInt4,
        "model.layers.1.mlp.down_proj": Fp8,
        "model.layers.1.self_attn.q_proj": None,
        "visual.blocks.0.mlp.gate_proj": None,
    }
    for name, kind in expected.items():
        assert type(told.layout(name)) is (kind or type(None)), name


def int4(n_out: int, n_groups: int, order: Tensor | None = None) -> Int4Weight:
    generator = torch.Generator().manual_seed(n_out)
    codes = torch.randint(0, 256, (n_out, 24), dtype=torch.uint8, generator=generator)
    zeros = torch.randint(0, 17, (n_out, n_groups), dtype=torch.uint8, generator=generator)
    return Int4Weight(codes, torch.rand(n_out, n_groups, generator=generator), zeros, order, torch.bfloat16)


def fp8(n_out: int, block: tuple[int, int]) -> ByteWeight:
    matrix = torch.randn(n_out, 48, generator=torch.Generator().manual_seed(n_out))
    codes, scales, _ = quantised.fp8_blocks(matrix, block)
    return ByteWeight(codes, scales, block, torch.bfloat16)


DENSE = torch.arange(96.0).view(2, 48).to(torch.bfloat16)
TURNED = torch.arange(48).flip(0)
JOINED: dict[str, tuple[list[Tensor | Quantized], type]] = {
    "one": ([int4(3, 2)], Int4Weight),
    "int4": ([int4(3, 2), int4(5, 2)], Int4Weight),
    "groups differ": ([int4(3, 2), int4(5, 3)], Tensor),
    "one order": ([int4(3, 2, TURNED), int4(5, 2, TURNED.clone())], Int4Weight),
    "orders differ": ([int4(3, 2, TURNED), int4(5, 2)], Tensor),
    "fp8": ([fp8(32, (16, 32)), fp8(20, (16, 32))], ByteWeight),
    "fp8 across blocks": ([fp8(20, (16, 32)), fp8(32, (16, 32))], ByteWeight),
    "fp8 of two kinds": ([fp8(20, (20, 48)), fp8(32, (1, 48))], ByteWeight),
    "fp8 of other inputs": ([fp8(20, (16, 32)), fp8(32, (16, 16))], Tensor),
    "both": ([int4(3, 2), fp8(32, (16, 32))], Tensor),
    "dense too": ([int4(3, 2), DENSE], Tensor),
    "dense": ([DENSE, DENSE], Tensor),
}


@pytest.mark.parametrize("case", JOINED)
def test_joined_matrices_keep_every_value(case: str) -> None:
    parts, kind = JOINED[case]
    matrix = joined(parts)
    assert isinstance(matrix, kind)
    expected = torch.cat([widened(part) for part in parts])
    assert torch.equal(widened(matrix), expected)
    assert tuple(matrix.shape) == tuple(expected.shape)


def test_values_by_hand() -> None:
    codes = torch.tensor([[0x10, 0x32], [0xFE, 0x00]], dtype=torch.uint8)  # [2, 4 inputs]
    scales = torch.tensor([[0.5, 2.0], [1.0, 0.25]])
    zeros = torch.tensor([[0, 3], [16, 1]], dtype=torch.uint8)
    plain = Int4Weight(codes, scales, zeros, None, torch.float32)
    values = torch.tensor([[0.0, 0.5, -2.0, 0.0], [-2.0, -1.0, -0.25, -0.25]])
    assert torch.equal(plain.dense(), values)
    turned = Int4Weight(codes, scales, zeros, torch.tensor([2, 0, 3, 1]), torch.float32)
    assert torch.equal(turned.dense(), values[:, [1, 3, 0, 2]])
    assert (turned.nbytes, turned.shape) == (4 + 16 + 4 + 32, (2, 4))
    eights = torch.tensor([[1.0, -2.0, 0.5]]).to(torch.float8_e4m3fn)
    assert torch.equal(
        ByteWeight(eights, torch.tensor([[3.0, 0.5]]), (2, 2), torch.bfloat16).dense(),
        torch.tensor([[3.0, -6.0, 0.25]], dtype=torch.bfloat16),
    )


@pytest.mark.parametrize(
    ("config", "bytes_per_value", "per_scale"),
    [(AWQ, 0.5, (1, 128, 5)), (GPTQ, 0.5, (1, 128, 5)), (FP8, 1, (128, 128, 4)), (floats(), 1, (1, 0, 4))],
    ids=["awq", "gptq", "fp8", "fp8 by channel"],
)
def test_a_plan_counts_codes_and_scales(
    tmp_path: Path, config: dict[str, Any], bytes_per_value: float, per_scale: tuple[int, int, int]
) -> None:
    """Qwen3-8B. per_scale: outputs and inputs (0: all) that share one, and the bytes of scale and zero."""
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**CONFIGS["Qwen3-8B"], "quantization_config": config}))
    told = forecast(Settings(model=str(path), spec_type="none", dtype="bfloat16")).networks["target"]
    assert told.n_params == PARAMETERS["Qwen3-8B"]
    # (outputs, inputs): queries, keys and values; output; gate and up; down.
    matrices = [(6144, 4096), (4096, 4096), (2 * 12288, 4096), (4096, 12288)]
    n_values = 36 * sum(n_out * n_in for n_out, n_in in matrices)
    outputs, inputs, size = per_scale
    n_scales = 36 * sum(n_out // outputs * (n_in // (inputs or n_in)) for n_out, n_in in matrices)
    assert told.weight_bytes == 2 * (told.n_params - n_values) + bytes_per_value * n_values + size * n_scales
