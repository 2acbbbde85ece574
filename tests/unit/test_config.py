"""The config reader: both dialects give the same, and what cannot be honoured is refused by key and value."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from slipstream.engine.errors import LoadError, UnsupportedModel
from slipstream.engine.models.reading.config import ModelConfig, read_config
from slipstream.engine.models.registry import decoder_spec, read_model
from tests.public_configs import CONFIGS

PLAIN: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 100,
    "max_position_embeddings": 512,
}


def read(folder: Path, generation: dict[str, Any] | None = None, **changes: Any) -> ModelConfig:
    """The config of a folder whose config.json is PLAIN with changes."""
    (folder / "config.json").write_text(json.dumps({**PLAIN, **changes}))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return read_config(folder)


def test_defaults(tmp_path: Path) -> None:
    config = read(tmp_path)
    assert (config.d_head, config.n_kv_heads, config.norm_eps) == (16, 4, 1e-6)
    assert (config.rope.kind, config.rope.theta, config.rope.n_dims) == ("default", 10000.0, 16)
    assert config.tied is None
    assert config.dtype == torch.float32
    assert config.sampling == {}


SCALED = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
OLD_TYPE = {"type": "llama3", **{name: value for name, value in SCALED.items() if name != "rope_type"}}


@pytest.mark.parametrize(
    ("older", "newer"),
    [
        ({"torch_dtype": "bfloat16"}, {"dtype": "bfloat16"}),
        ({"torch_dtype": "torch.float16"}, {"dtype": "float16"}),
        ({"rope_theta": 5e5}, {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}),
        (
            {"rope_theta": 5e5, "rope_scaling": None},
            {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
        ),
        ({"rope_theta": 5e5, "rope_scaling": SCALED}, {"rope_parameters": {**SCALED, "rope_theta": 5e5}}),
        ({"rope_theta": 5e5, "rope_scaling": OLD_TYPE}, {"rope_parameters": {**SCALED, "rope_theta": 5e5}}),
        (
            {"partial_rotary_factor": 0.5},
            {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5, "rope_theta": 1e4}},
        ),
        ({"rope_scaling": {"type": "mrope"}}, {}),
        (
            {"rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]}},
            {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}},
        ),
        ({"head_dim": None}, {"head_dim": 16}),
        ({"sliding_window": None, "use_sliding_window": True}, {"layer_types": ["full_attention"] * 2}),
    ],
)
def test_both_dialects_read_the_same(tmp_path: Path, older: dict[str, Any], newer: dict[str, Any]) -> None:
    assert read(tmp_path, **older) == read(tmp_path, **newer)


def test_newer_keys_win(tmp_path: Path) -> None:
    config = read(
        tmp_path, rope_theta=1.0, rope_parameters={"rope_theta": 2.0}, rope_scaling={"type": "mrope"}
    )
    assert config.rope.theta == 2.0


@pytest.mark.parametrize("newer", [{"rope_theta": 2.0}, {**SCALED, "factor": 4.0}])
def test_a_scaling_beside_other_rope_parameters_is_not_ignored(tmp_path: Path, newer: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedModel, match=r"rope_scaling = .*differs from rope_parameters"):
        read(tmp_path, rope_parameters=newer, rope_scaling=OLD_TYPE)
    same = read(tmp_path, rope_parameters={**SCALED, "rope_theta": 2.0}, rope_scaling=OLD_TYPE).rope
    assert (same.kind, same.factor, same.theta) == ("llama3", 8.0, 2.0)


def test_head_dim_is_not_derived_when_given(tmp_path: Path) -> None:
    assert read(tmp_path, head_dim=128).d_head == 128


def test_yarn(tmp_path: Path) -> None:
    yarn = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
    rope = read(tmp_path, rope_scaling=yarn).rope
    assert (rope.n_ctx_original, rope.beta_fast, rope.beta_slow, rope.truncate) == (128, 32.0, 1.0, True)
    assert rope.attention_factor == pytest.approx(1.1386294)  # 0.1 ln 4 + 1
    assert read(tmp_path, rope_scaling={**yarn, "attention_factor": 2.0}).rope.attention_factor == 2.0
    equal = {**yarn, "mscale": 0.7, "mscale_all_dim": 0.7}
    assert read(tmp_path, rope_scaling=equal).rope.attention_factor == 1.0
    assert read(tmp_path, rope_scaling={**yarn, "factor": None}).rope.factor == 4.0


def test_sampling_defaults(tmp_path: Path) -> None:
    given = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "repetition_penalty": 1.05, "do_sample": True}
    expected = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "repeat_penalty": 1.05}
    assert read(tmp_path, {**given, "min_p": None, "max_length": 20}).sampling == expected
    assert read(tmp_path, {**given, "do_sample": False}).sampling["temperature"] == 0.0


def test_suppressed_tokens(tmp_path: Path) -> None:
    assert read(tmp_path, {"suppress_tokens": [7, 300]}).suppressed == (7, 300)
    assert read(tmp_path, {"suppress_tokens": None}).suppressed == ()
    for value in ([-1], ["7"], 7, [True]):
        with pytest.raises(UnsupportedModel, match=r"suppress_tokens = .*: must be a list of token ids"):
            read(tmp_path, {"suppress_tokens": value})


REFUSED: list[tuple[str, Any]] = [
    ("hidden_act", "gelu"),
    ("quantization_config", {"quant_method": "bitsandbytes"}),
    ("text_config", {}),
    ("attn_logit_softcapping", 50.0),
    ("residual_multiplier", 0.2),
    ("num_experts", 8),
    ("sliding_window", 128),
    ("layer_types", ["full_attention", "sliding_attention"]),
    ("layer_types", "full_attention"),
    ("layer_types", [["full_attention"]] * 2),
    ("layer_types", []),
    ("rope_scaling", {"rope_type": "longrope", "factor": 2.0}),
    ("rope_scaling", {"type": "dynamic", "factor": 2.0}),
    ("rope_scaling", {"type": "linear"}),
    ("rope_scaling", {"type": "linear", "factor": 0}),
    ("rope_scaling", {**SCALED, "low_freq_factor": 4.0}),
    ("rope_scaling", 3),
    ("rope_parameters", {"full_attention": {"rope_type": "default"}}),
    ("rope_theta", "x"),
    ("partial_rotary_factor", 2.0),
    ("partial_rotary_factor", 0.2),
    ("partial_rotary_factor", 1e308),
    ("rope_parameters", {"partial_rotary_factor": 1e308}),
    pytest.param("rope_theta", 10**400, id="rope_theta-beyond-floats"),
    ("head_dim", 0),
    ("head_dim", 15),
    ("hidden_size", "64"),
    ("hidden_size", True),
    ("num_key_value_heads", 3),
    ("vocab_size", None),
    ("rms_norm_eps", 0),
    ("rms_norm_eps", float("nan")),
    ("attention_bias", 1),
    ("tie_word_embeddings", "yes"),
    ("torch_dtype", "int8"),
    ("architectures", []),
    ("architectures", None),
]


@pytest.mark.parametrize(("key", "value"), REFUSED)
def test_what_cannot_be_honoured_is_refused_by_name(tmp_path: Path, key: str, value: Any) -> None:
    with pytest.raises(UnsupportedModel) as caught:
        read(tmp_path, **{key: value})
    message = str(caught.value)
    assert key in message
    assert "\n" not in message
    if isinstance(value, dict) and "rope_type" in value:
        assert "longrope" in message or "low_freq_factor" in message


@pytest.mark.parametrize(
    "changes",
    [
        {"sliding_window": 4096, "use_sliding_window": False},
        {"sliding_window": 512},
        {"sliding_window": 128, "use_sliding_window": True, "max_window_layers": 2},
        {"hidden_act": "silu", "num_experts": 0, "initializer_range": 0.1, "some_new_key": [1]},
    ],
)
def test_what_is_off_is_not_refused(tmp_path: Path, changes: dict[str, Any]) -> None:
    read(tmp_path, **changes)


@pytest.mark.parametrize(
    "generation", [{"temperature": "hot"}, {"temperature": -1}, {"top_p": 1.5}, {"repetition_penalty": 0}]
)
def test_wrong_sampling_defaults_are_refused(tmp_path: Path, generation: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedModel, match=next(iter(generation))):
        read(tmp_path, generation)


@pytest.mark.parametrize("text", ["", "{", "[]", "[" * 100_000])
def test_broken_file_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(LoadError, match=r"config\.json"):
        read_config(tmp_path)


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("DeepSeek-V3", "mlp_layer_types"),
        ("Gemma-3-1B", "layer_types"),
        ("Kimi-Linear-48B-A3B", "layer_types"),
        ("MiMo-V2-Flash", "layer_types"),
        ("MiMo-V2-Flash", "mlp_layer_types"),
        ("Qwen3-Next-80B-A3B", "layer_types"),
    ],
)
def test_kinds_of_layers_are_known_names_for_each(tmp_path: Path, name: str, key: str) -> None:
    """Also of values that no set can hold."""
    n = CONFIGS[name]["num_hidden_layers"]
    for kinds in ("full_attention", [], ["full_attention"] * (n - 1), ["x"] * n, [["full_attention"]] * n):
        (tmp_path / "config.json").write_text(json.dumps({**CONFIGS[name], key: kinds}))
        with pytest.raises(UnsupportedModel, match=f"{key} = .*must name .* for {n} layers"):
            decoder_spec(read_model(tmp_path), 64)


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [
        ("DeepSeek-V3", "n_group", 8),
        ("DeepSeek-V3", "routed_scaling_factor", 2.5),
        ("DeepSeek-V3", "topk_group", 4),
        ("GLM-4.5", "rms_norm_eps", 1e-5),
        ("GLM-4.7-Flash", "rms_norm_eps", 1e-5),
        ("GLM-4.7-Flash", "routed_scaling_factor", 1.8),
        ("Kimi-Linear-48B-A3B", "rms_norm_eps", 1e-5),
        ("Kimi-Linear-48B-A3B", "routed_scaling_factor", 2.446),
        ("MiMo-V2-Flash", "rope_theta", 5e6),
        ("Qwen2.5-7B", "max_window_layers", 28),
        ("Qwen2.5-VL-7B", "max_window_layers", 80),
        ("Qwen3-8B", "max_window_layers", 28),
        ("Qwen3-Next-80B-A3B", "partial_rotary_factor", 0.25),
        ("gpt-oss-20b", "rms_norm_eps", 1e-5),
        ("gpt-oss-20b", "rope_theta", 150_000.0),
    ],
)
def test_what_is_left_out_is_what_transformers_assumes(
    tmp_path: Path, name: str, key: str, value: float
) -> None:
    slides = {"use_sliding_window": True, "sliding_window": 64} if key == "max_window_layers" else {}
    made = []
    for said in (value, None):
        (tmp_path / "config.json").write_text(json.dumps({**CONFIGS[name], **slides, key: said}))
        spec = decoder_spec(read_model(tmp_path), 64)
        made.append((spec.norm, list(spec.blocks)))
    assert made[0] == made[1]


@pytest.mark.parametrize("key", ["num_hidden_layers", "hidden_size", "max_position_embeddings"])
def test_absurd_sizes_are_refused_at_once(tmp_path: Path, key: str) -> None:
    size = 10**9 if key == "num_hidden_layers" else 10**18
    with pytest.raises(UnsupportedModel, match=rf"{key} = {size}: is more than \d+, which no model has"):
        read(tmp_path, **{key: size})


def test_a_pipe_is_no_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "config.json")
    with pytest.raises(LoadError, match=r"config\.json: not a regular file"):
        read_config(tmp_path)


def test_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(LoadError, match="no such file"):
        read_config(tmp_path)


def test_a_file_alone_reads_as_its_folder_does(tmp_path: Path) -> None:
    config = read(tmp_path, {"temperature": 0.5})
    assert config.sampling == {"temperature": 0.5}
    assert read_config(tmp_path / "config.json") == config
    (tmp_path / "config.json").rename(tmp_path / "other.json")
    assert read_config(tmp_path / "other.json") == config
