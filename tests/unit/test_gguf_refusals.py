"""GGUF files whose header is sound and whose model is not: refused by the file's own names for keys and tensors."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from slipstream import kernels
from slipstream.engine.errors import CheckpointMismatch, LoadError, UnsupportedModel
from slipstream.engine.models.registry import load_network, read_model
from tests.gguf_files import Blocks, Contents, quantised
from tests.gguf_tiny import CPU, D_FFN, D_MODEL, MATRICES, VOCAB, refusal, tiny


@pytest.fixture(scope="module", autouse=True)
def _selected() -> None:
    kernels.select(CPU, torch.float32)


def test_the_tiny_model_loads(tmp_path: Path) -> None:
    """Otherwise refusals would prove nothing."""
    path = tiny().write(tmp_path / "model.gguf")
    n_params = sum(map(math.prod, MATRICES.values())) + 3 * D_MODEL + VOCAB * D_MODEL
    assert load_network(path, torch.float32, CPU, 64).n_params == n_params


MISSING = [
    *("block_count", "context_length", "embedding_length", "attention.head_count"),
    "attention.layer_norm_rms_epsilon",
]


@pytest.mark.parametrize("key", MISSING)
def test_missing_keys(tmp_path: Path, key: str) -> None:
    path = tiny(more={f".{key}": None}).write(tmp_path / "model.gguf")
    assert refusal(path, LoadError) == f"model.gguf: llama.{key} is missing"


def test_a_folder_of_files_is_not_taken_for_a_checkpoint(tmp_path: Path) -> None:
    """As a download of a hub repository makes one."""
    for name in ("b.gguf", "a.gguf"):
        tiny().write(tmp_path / name)
    expected = (
        f"{tmp_path}: a folder with GGUF files and no config.json; name a file, such as {tmp_path}/a.gguf"
    )
    with pytest.raises(LoadError, match=f"^{re.escape(expected)}$"):
        read_model(tmp_path)


COUNT = "must be a whole number from 0 to 2147483647"
# Key -> (value, message).
VALUES: list[tuple[str, Any, str]] = [
    (".block_count", "1", f"llama.block_count = '1': {COUNT}"),
    (".block_count", True, f"llama.block_count = True: {COUNT}"),
    (".block_count", 2**32 - 1, f"llama.block_count = 4294967295: {COUNT}"),
    (".block_count", 20_000, "llama.block_count = 20000: is more than 10000, which no model has"),
    (".nextn_predict_layers", 3, "num_hidden_layers = -2"),
    (".embedding_length", 64.0, f"llama.embedding_length = 64.0: {COUNT}"),
    (".attention.head_count", 0, "num_attention_heads = 0"),
    (".attention.head_count", [1, 2, 3], "= [1, 2, 3]: layers of different shapes are not supported"),
    (".attention.head_count", [*range(5000)], "31, 3 …: layers of different shapes are not supported"),
    (".attention.head_count_kv", ["x", "x"], f"llama.attention.head_count_kv = ['x', 'x']: {COUNT}"),
    (".attention.head_count_kv", 3, "num_key_value_heads = 3: must divide num_attention_heads = 2"),
    (".attention.value_length", 16, "llama.attention.value_length = 16: must be attention.key_length = 32"),
    (".attention.layer_norm_rms_epsilon", math.nan, "layer_norm_rms_epsilon = nan: must be a finite number"),
    (".attention.layer_norm_rms_epsilon", -1.0, "rms_norm_eps = -1.0: must be above 0"),
    (".attention.layer_norm_rms_epsilon", "1e-6", "= '1e-6': must be a finite number"),
    (".rope.freq_base", math.inf, "llama.rope.freq_base = inf: must be a finite number"),
    (".rope.freq_base", False, "llama.rope.freq_base = False: must be a finite number"),
    (".rope.scaling.type", 1, "llama.rope.scaling.type = 1: must be a string"),
    (".rope.scaling.type", "longrope", "= 'longrope': must be one of none, linear, yarn"),
    (".rope.scaling.type", "x" * 9999, "xxx': must be one of none, linear, yarn"),
    (".rope.scaling.type", "a\nb", r"llama.rope.scaling.type = 'a\nb': must be one of"),
    (".rope.dimension_count", 16, "must be the width of a head, 32, and even"),
    (".expert_count", 8, "llama.expert_count = 8: experts are not supported in this architecture"),
    (".attention.max_alibi_bias", 8.0, "llama.attention.max_alibi_bias = 8.0: not supported"),
    (".attention.clamp_kqv", 1.5, "llama.attention.clamp_kqv = 1.5: not supported"),
    (".attn_logit_softcapping", 50.0, "llama.attn_logit_softcapping = 50.0: not supported"),
    (".attention.causal", False, "llama.attention.causal = False: not supported"),
    (".logit_scale", 0.5, "llama.logit_scale = 0.5: not supported"),
    (".embedding_scale", 12.0, "llama.embedding_scale = 12.0: not supported"),
    (".residual_scale", 0.25, "llama.residual_scale = 0.25: not supported"),
    (".attention.temperature_scale", 0.5, "llama.attention.temperature_scale = 0.5: not supported"),
    (".attention.sliding_window", 4096, "llama.attention.sliding_window = 4096: not supported"),
    (".final_logit_softcapping", 30.0, "llama.final_logit_softcapping = 30.0: not supported"),
    (".rope.freq_base_swa", 1e4, "llama.rope.freq_base_swa = 10000.0: not supported"),
    (".rope.scale_linear", 4.0, "llama.rope.scale_linear = 4.0: not supported"),
    (".expert_weights_scale", 2.5, "llama.expert_weights_scale = 2.5: not supported"),
    (".expert_weights_norm", False, "llama.expert_weights_norm = False: not supported"),
    (".expert_gating_func", 2, "llama.expert_gating_func = 2: not supported"),
    (".expert_group_count", 4, "llama.expert_group_count = 4: not supported"),
    ("general.sampling.temp", "hot", 'temperature = "hot": must be a finite number'),
    ("general.sampling.top_p", 2.0, "top_p = 2.0: out of range"),
]


@pytest.mark.parametrize(("key", "value", "message"), VALUES, ids=lambda one: str(one)[:40])
def test_values_of_keys(tmp_path: Path, key: str, value: Any, message: str) -> None:
    path = tiny(more={key: value}).write(tmp_path / "model.gguf")
    assert message in refusal(path, UnsupportedModel)


def test_a_factor_without_a_type_stretches_linearly(tmp_path: Path) -> None:
    """As in llama.cpp."""
    rope = read_model(tiny(more={".rope.scaling.factor": 4.0}).write(tmp_path / "model.gguf")).rope
    assert (rope.kind, rope.factor) == ("linear", 4.0)


YARN = {".rope.scaling.type": "yarn", ".rope.scaling.factor": 4.0}


@pytest.mark.parametrize(
    ("more", "error", "message"),
    [
        (YARN, LoadError, "llama.rope.scaling.original_context_length is missing"),
        (
            {**YARN, ".rope.scaling.yarn_ext_factor": 0.5},
            UnsupportedModel,
            "llama.rope.scaling.yarn_ext_factor = 0.5: only 1 is supported",
        ),
        ({**YARN, ".rope.scaling.factor": math.nan}, UnsupportedModel, "rope.scaling.factor = nan: must be"),
        ({**YARN, ".rope.scaling.yarn_log_multiplier": 0.1}, UnsupportedModel, "yarn_log_multiplier = 0.1"),
    ],
    ids=str,
)
def test_scaled_rotations(tmp_path: Path, more: Any, error: type[LoadError], message: str) -> None:
    path = tiny(more=more).write(tmp_path / "model.gguf")
    assert message in refusal(path, error)


def test_rows_and_flags_of_layers(tmp_path: Path) -> None:
    """Lists with a value for each layer."""
    window = {".attention.sliding_window": 16, ".attention.sliding_window_pattern": [True]}
    path = tiny("gemma3", {**window, ".block_count": 3}).write(tmp_path / "model.gguf")
    expected = "gemma3.attention.sliding_window_pattern = [True]: must be a list of 3 values"
    assert refusal(path, UnsupportedModel) == f"model.gguf: {expected}"


def test_architectures(tmp_path: Path) -> None:
    path = tiny("mamba").write(tmp_path / "model.gguf")
    message = refusal(path, UnsupportedModel)
    assert message.startswith(
        "model.gguf: general.architecture = 'mamba' is not supported; known: deepseek2, dflash,"
    )
    path = tiny().with_keys({"general.architecture": None}).write(tmp_path / "model.gguf")
    data = path.read_bytes().replace(b"general.architecture", b"general.architectura")
    path.write_bytes(data)
    assert refusal(path, LoadError) == "model.gguf: general.architecture = None, must be a string"


# --- tensors -------------------------------------------------------------------------------------------------


def test_tensors_that_are_missing_or_surplus_have_the_files_names(tmp_path: Path) -> None:
    whole = tiny()
    path = whole.with_tensors({"blk.0.attn_k.weight": None, "blk.0.ffn_norm.weight": None}).write(
        tmp_path / "model.gguf"
    )
    expected = "blk.0.attn_k.weight, blk.0.ffn_norm.weight or blk.0.post_attention_norm.weight"
    assert refusal(path, CheckpointMismatch) == f"model.gguf: missing: {expected}"
    more = {name: torch.ones(1) for name in ("blk.7.attn_q.weight", "blk.0.attn_odd.weight", "v.patch_embd")}
    path = whole.with_tensors(more).write(path)
    expected = "unused: blk.0.attn_odd.weight, blk.7.attn_q.weight, v.patch_embd"
    assert refusal(path, CheckpointMismatch) == f"model.gguf: {expected}"
    path = whole.with_tensors({"output_norm.weight": None}).write(path)
    assert refusal(path, CheckpointMismatch) == "model.gguf: missing: output_norm.weight"
    path = whole.with_tensors({"token_embd.weight": None}).write(path)
    assert refusal(path, LoadError) == "model.gguf: tensor token_embd.weight is missing"


def experts(n: int, d: int = D_FFN, **tensors: Tensor | None) -> Contents:
    """The same with experts."""
    shapes = {
        "ffn_gate_exps": (n, d, D_MODEL),
        "ffn_up_exps": (n, d, D_MODEL),
        "ffn_down_exps": (n, D_MODEL, d),
    }
    made: dict[str, Tensor | None] = {name: torch.full(shape, 0.01) for name, shape in shapes.items()}
    norms = {name: torch.ones(32) for name in ("attn_q_norm", "attn_k_norm")}
    router = {"ffn_gate_inp": torch.ones(n, D_MODEL)}
    more = {".expert_count": 4, ".expert_used_count": 2, ".expert_feed_forward_length": D_FFN}
    dense = dict.fromkeys(("ffn_gate", "ffn_up", "ffn_down"))
    return tiny("qwen3moe", more, **{**dense, **norms, **router, **made, **tensors})


def test_experts(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    load_network(experts(4).write(path), torch.float32, CPU, 64)
    message = refusal(experts(4, ffn_up_exps=None).write(path), CheckpointMismatch)
    assert message == "model.gguf: missing: blk.0.ffn_up_exps.weight"
    message = refusal(experts(5, ffn_gate_inp=torch.ones(4, D_MODEL)).write(path), CheckpointMismatch)
    names = [f"blk.0.ffn_{part}_exps.weight" for part in ("down", "gate", "up")]
    assert message == f"model.gguf: unused: {', '.join(names)}"
    message = refusal(experts(4, ffn_up_exps=torch.ones(4, D_MODEL)).write(path), LoadError)
    assert "tensor blk.0.ffn_up_exps.weight has shape [4, 64], experts must have three dimensions" in message
    wide = experts(4).with_keys({".expert_feed_forward_length": 2**31 - 1}).write(path)
    assert (
        "tensor blk.0.ffn_gate_exps.weight has shape [32, 64], the config asks for [2147483647, 64]"
        in refusal(wide, LoadError)
    )
    many = experts(4, ffn_up_exps=torch.ones(10_001, 1, 1)).write(path)
    assert "has shape [10001, 1, 1], experts must have three dimensions, the first at most 10000" in refusal(
        many, LoadError
    )


def test_shapes(tmp_path: Path) -> None:
    path = tiny(attn_k=torch.ones(31, D_MODEL)).write(tmp_path / "model.gguf")
    expected = "tensor blk.0.attn_k.weight has shape [31, 64], the config asks for [32, 64]"
    assert refusal(path, LoadError) == f"model.gguf: {expected}"
    path = tiny(attn_q=torch.ones(48, D_MODEL)).write(path)
    assert "tensor blk.0.attn_q.weight has shape [48, 64], the config asks for [64, 64]" in refusal(
        path, LoadError
    )


def test_experts_of_other_shapes(tmp_path: Path) -> None:
    shape = (2, D_FFN, D_MODEL)
    more = {".expert_count": 2, ".expert_used_count": 1, ".expert_feed_forward_length": D_FFN}
    stacks: dict[str, dict[str, Tensor]] = {
        "ffn_down_exps.weight has shape [3, 5], the config asks for [64, 32]": {
            "ffn_gate_exps.weight": torch.ones(shape),
            "ffn_up_exps.weight": torch.ones(shape),
            "ffn_down_exps.weight": torch.ones(2, 3, 5),
        },
        "ffn_up_exps.weight has shape [32, 32], the config asks for [32, 64]": {
            "ffn_gate_exps.weight": torch.ones(shape),
            "ffn_up_exps.weight": torch.ones(2, D_FFN, 32),
        },
        "ffn_up_exps.bias has shape [2, 5], must have 2 dimensions as blk.0.ffn_gate_exps.bias [2, 32]": {
            "ffn_gate_exps.bias": torch.ones(2, D_FFN),
            "ffn_up_exps.bias": torch.ones(2, 5),
        },
    }
    for message, tensors in stacks.items():
        contents = tiny("gpt-oss", more).with_tensors({f"blk.0.{name}": one for name, one in tensors.items()})
        assert message in refusal(contents.write(tmp_path / "model.gguf"), LoadError)


@pytest.mark.parametrize(
    ("stored", "message"),
    [
        (Blocks("I8", np.zeros((32, 64), np.uint8)), "has type I8, which is not supported"),
        (Blocks("Q8_1", np.zeros((32, 80), np.uint8)), "has type Q8_1, which is not supported"),
        (Blocks("I32", np.zeros((32, 256), np.uint8)), "has dtype I32; only BF16, F16, F32, F64"),
    ],
    ids=["I8", "Q8_1", "I32"],
)
def test_types_without_values(tmp_path: Path, stored: Blocks, message: str) -> None:
    path = tiny().with_tensors({"blk.0.attn_v.weight": stored}).write(tmp_path / "model.gguf")
    assert refusal(path, UnsupportedModel) == f"model.gguf: tensor blk.0.attn_v.weight {message}"


def test_vectors_in_blocks(tmp_path: Path) -> None:
    """No writer makes them; they are the numbers that they stand for."""
    norm = torch.linspace(-1, 1, D_MODEL)
    contents = tiny(attn_norm=norm)
    blocks = contents.with_tensors({"blk.0.attn_norm.weight": quantised(norm, "Q8_0")})
    networks = [
        load_network(one.write(tmp_path / "model.gguf"), torch.float32, CPU, 64)
        for one in (blocks, blocks.widened(), contents)
    ]
    narrow, wide, exact = (one.decoder.blocks[0].mixer_norm.weight for one in networks)
    assert torch.equal(narrow, wide)
    assert not torch.equal(narrow, exact)


@pytest.mark.parametrize("value", [0x7C00, 0xFC00, 0x7E00], ids=["inf", "-inf", "nan"])
@pytest.mark.parametrize(
    ("kind", "block", "places"),
    [
        ("Q4_0", 18, (0,)),
        ("Q4_1", 20, (0, 2)),
        ("Q8_0", 34, (0,)),
        ("Q5_1", 24, (0, 2)),
        ("IQ4_NL", 18, (0,)),
    ],
)
def test_scales_that_are_not_finite(
    tmp_path: Path, kind: str, block: int, places: tuple[int, ...], value: int
) -> None:
    """In one block of a matrix; also the minima of types that have them."""
    for at in places:
        data = np.zeros((32, 2 * block), np.uint8)
        data[31, block + at : block + at + 2] = [value & 255, value >> 8]
        stored = Blocks(kind, data)
        path = tiny().with_tensors({"blk.0.attn_v.weight": stored}).write(tmp_path / "model.gguf")
        message = refusal(path, LoadError)
        assert (
            message
            == "model.gguf: tensor blk.0.attn_v.weight holds values that are not finite; the file is damaged"
        )


def test_blocks_that_are_computed_with(tmp_path: Path) -> None:
    """Numbers that are not finite come through to where they are refused, without a warning."""
    data = np.zeros(48, np.uint8)
    data[1] = 0x7C  # the first scale is infinite, its codes 0
    for name in ("attn_norm", "ffn_norm"):
        path = (
            tiny().with_tensors({f"blk.0.{name}.weight": Blocks("Q5_1", data)}).write(tmp_path / "model.gguf")
        )
        assert f"tensor blk.0.{name}.weight holds values that are not finite" in refusal(path, LoadError)


def test_plain_numbers_that_are_not_finite(tmp_path: Path) -> None:
    for value in (math.nan, math.inf):
        broken = torch.ones(D_MODEL)
        broken[17] = value
        path = tiny(attn_norm=broken).write(tmp_path / "model.gguf")
        assert "tensor blk.0.attn_norm.weight holds values that are not finite" in refusal(path, LoadError)


@pytest.mark.parametrize(
    ("factors", "error", "message"),
    [
        (torch.ones(15), UnsupportedModel, "divisors = "),
        (torch.zeros(16), UnsupportedModel, "must be 16 numbers above 0"),
        (torch.full((16,), math.nan), UnsupportedModel, "must be 16 numbers above 0"),
        (
            torch.ones(4, 4),
            UnsupportedModel,
            "tensor rope_freqs.weight is F32 [4, 4], must be a vector of F32",
        ),
        (
            torch.ones(16, dtype=torch.float16),
            UnsupportedModel,
            "rope_freqs.weight is F16 [16], must be a vector",
        ),
    ],
    ids=["few", "zero", "nan", "matrix", "half"],
)
def test_divisors_of_frequencies(
    tmp_path: Path, factors: Tensor, error: type[LoadError], message: str
) -> None:
    path = tiny().with_tensors({"rope_freqs.weight": factors}).write(tmp_path / "model.gguf")
    assert message in refusal(path, error)


@pytest.mark.parametrize("kind", ["linear", "yarn"])
def test_rotations_are_not_divided_and_stretched(tmp_path: Path, kind: str) -> None:
    """llama.cpp does both."""
    divided = tiny().with_tensors({"rope_freqs.weight": torch.ones(16)})
    more = {".rope.scaling.type": kind, ".rope.scaling.factor": 4.0}
    path = divided.with_keys(more).write(tmp_path / "model.gguf")
    expected = "model.gguf: llama.rope.scaling.factor = 4.0: not supported beside rope_freqs.weight"
    assert refusal(path, UnsupportedModel) == expected
    for harmless in ({".rope.scaling.type": "none"}, {".rope.scaling.factor": 1.0}):
        assert read_model(divided.with_keys(more | harmless).write(path)).rope.kind == "divided"


def test_a_config_of_a_broken_file_says_the_same(tmp_path: Path) -> None:
    """Reading the config alone refuses as loading does."""
    path = tiny(more={".rope.scaling.type": "su"}).write(tmp_path / "model.gguf")
    with pytest.raises(UnsupportedModel, match=r"model\.gguf: llama\.rope\.scaling\.type = 'su'"):
        read_model(path)
