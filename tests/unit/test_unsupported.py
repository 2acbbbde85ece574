"""What is said of architectures that are not supported: what they lack, and which supported one is nearest."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from slipstream.engine.errors import UnsupportedModel
from slipstream.engine.models.reading.fields import Fields
from slipstream.engine.models.reading.unsupported import ASKS_FOR, LIKE, PLAIN, asked_for, nearest
from slipstream.engine.models.registry import FAMILIES, read_model
from tests.checkpoints import tiny_checkpoint
from tests.public_configs import CONFIGS

# Architecture, its config's keys, what is said of it, the nearest.
CASES: list[tuple[str, dict[str, Any], str, str]] = [
    (
        "DeepseekV32ForCausalLM",
        {"n_routed_experts": 256, "kv_lora_rank": 512, "index_topk": 2048},
        "sparse attention with an indexer (index_topk = 2048)",
        "DeepseekV3ForCausalLM",
    ),
    (
        "LongcatFlashForCausalLM",
        {"kv_lora_rank": 512, "zero_expert_num": 256},
        "experts that compute nothing (zero_expert_num = 256)",
        "DeepseekV3ForCausalLM",
    ),
    (
        "FalconH1ForCausalLM",
        {"mamba_d_state": 256, "mamba_num_heads": 8, "hidden_act": "relu2"},
        'state-space layers (mamba_d_state = 256); another activation (hidden_act = "relu2")',
        PLAIN,
    ),
    (
        "CohereForCausalLM",
        {"logit_scale": 0.25, "layer_types": ["full_attention", "chunked_attention"]},
        "a factor (logit_scale = 0.25); another kind of layer (layer_types: chunked_attention)",
        "Gemma3ForCausalLM",
    ),
    ("MixtralForCausalLM", {"num_local_experts": 8}, "it may only lack a family file", "MistralForCausalLM"),
    (
        "Qwen4VLForConditionalGeneration",
        {},
        "it may only lack a family file",
        "Qwen3VLForConditionalGeneration",
    ),
]


@pytest.mark.parametrize(("name", "keys", "said", "near"), CASES, ids=[case[0] for case in CASES])
def test_the_error_says_what_is_missing(
    tmp_path: Path, name: str, keys: dict[str, Any], said: str, near: str
) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"architectures": [name], "hidden_size": 64, **keys}))
    with pytest.raises(UnsupportedModel) as error:
        read_model(config)
    text = str(error.value)
    assert text.startswith(f"{config}: architecture {name} is not supported. It")
    assert said in text
    assert f"Nearest of those that are: {near};" in text


def test_keys_of_a_wrapper_are_those_of_its_text_model(tmp_path: Path) -> None:
    wrapper = {
        "architectures": ["Some"],
        "text_config": {"index_topk": 7},
        "vision_config": {"layer_norm_eps": 1e-6},
    }
    (tmp_path / "config.json").write_text(json.dumps(wrapper))
    with pytest.raises(
        UnsupportedModel, match=r"no supported one has: sparse [^;]*\(index_topk = 7\)\. Nearest"
    ):
        read_model(tmp_path)


@pytest.mark.parametrize(
    "family",
    ["gemma3", "qwen3_5_moe", "gpt_oss", "deepseek_v3", "kimi_linear", "mimo_v2_flash", "step3p7"],
)
def test_nothing_that_a_supported_model_asks_for_counts_as_missing(tmp_path: Path, family: str) -> None:
    values = json.loads((tiny_checkpoint(family, tmp_path) / "config.json").read_text())
    assert asked_for(Fields(values, "")) == []


def test_released_models_are_not_said_to_lack_anything() -> None:
    for name, values in CONFIGS.items():
        assert asked_for(Fields(values, name)) == [], name


def test_what_others_are_compared_with_is_supported() -> None:
    assert {*LIKE.values(), PLAIN} <= FAMILIES.keys()
    assert nearest("Gemma3nForConditionalGeneration", Fields({}, ""), FAMILIES).startswith("Gemma3")
    assert all(ASKS_FOR.values())
