"""Text models of vision-language checkpoints against transformers, which runs the whole checkpoint on text alone."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from slipstream.engine.errors import CheckpointMismatch, LoadError, UnsupportedModel
from slipstream.engine.models.registry import read_model
from tests.checkpoints import N_PROMPT, Oracle, edited, theirs, tiny_checkpoint, with_config
from tests.oracle.feeding import (
    Runner,
    compare_cuts,
    compare_greedy,
    compare_ragged,
    difference,
    loaded,
    rows,
)
from tests.tiny_families import GROWING

pytestmark = pytest.mark.usefixtures("_selected")
YARN = {"rope_type": "yarn", "rope_theta": 5e6, "factor": 4.0, "original_max_position_embeddings": 64}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2_5_vl": ("qwen2_5_vl", {}),
    "qwen2_5_vl, tied": ("qwen2_5_vl", {"tie_word_embeddings": True}),
    "qwen3_vl": ("qwen3_vl", {}),
    "qwen3_vl, yarn": ("qwen3_vl", {"rope_parameters": {**YARN, "mrope_section": [6, 5, 5]}}),
    "qwen3_vl_moe": ("qwen3_vl_moe", {}),
    "qwen3_vl_moe, some dense": ("qwen3_vl_moe", {"mlp_only_layers": [1], "tie_word_embeddings": True}),
    "mistral3": ("mistral3", {}),
    "mistral3 of ministral3": ("mistral3 of ministral3", {}),
    "ministral3": ("ministral3", {"rope_parameters": {**GROWING, "mscale_all_dim": 0.5}}),
}
PLAIN = ("qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "mistral3", "mistral3 of ministral3")


@pytest.mark.sampled(keep=5)
@pytest.mark.usefixtures("ops")
@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_whole_in_chunks_and_token_by_token(oracle: Callable[[str], Oracle], variant: str) -> None:
    folder, prompt, expected = oracle(variant)
    compare_cuts(Runner(loaded(folder)), prompt, expected)


@pytest.mark.sampled(keep=3)
@pytest.mark.usefixtures("ops")
@pytest.mark.parametrize("variant", PLAIN)
def test_ragged_spans_with_drafts_of_which_some_are_kept(
    oracle: Callable[[str], Oracle], variant: str
) -> None:
    folder, prompt, expected = oracle(variant)
    compare_ragged(Runner(loaded(folder)), prompt, expected, seed=2)


@pytest.mark.sampled(keep=6)
@pytest.mark.parametrize("variant", PLAIN)
def test_greedy_text(oracle: Callable[[str], Oracle], variant: str) -> None:
    folder, prompt, _ = oracle(variant)
    compare_greedy(Runner, folder, prompt[:30])


@pytest.mark.parametrize("variant", PLAIN)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_any_cut_gives_the_same_bits(
    oracle: Callable[[str], Oracle], variant: str, dtype: torch.dtype
) -> None:
    folder, prompt, expected = oracle(variant)
    ids, runner = prompt.tolist(), Runner(loaded(folder, dtype))
    whole = runner.feed_chunks(0, ids, [N_PROMPT])
    assert torch.equal(runner.feed_chunks(1, ids, [33, 1, 15, 2, 49]), whole)
    assert (whole - expected).abs().mean() < 0.1 * expected.std()


def rewritten(folder: Path, target: Path, config: dict[str, Any], names: dict[str, str]) -> Path:
    """A copy with another config, its tensors under other names. names: prefix -> another, the first that fits."""
    copy = edited(folder, target, lambda all: None)
    (copy / "config.json").write_text(json.dumps(config))

    def renamed(name: str) -> str:
        for prefix, other in names.items():
            if name.startswith(prefix):
                return other + name.removeprefix(prefix)
        return name

    tensors = {renamed(name): one for name, one in load_file(folder / "model.safetensors").items()}
    save_file(tensors, copy / "model.safetensors")
    return copy


def config_of(folder: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return config


def released_qwen2_5_vl(config: dict[str, Any]) -> dict[str, Any]:
    """The keys as the first files have them: the text model's beside those of the tower, in older words."""
    text = dict(config.pop("text_config"))
    sections = text.pop("rope_parameters")["mrope_section"]
    for key in ("dtype", "layer_types", "model_type", "tie_word_embeddings"):
        text.pop(key, None)
    return {
        **text,
        **config,
        "rope_theta": 1e6,
        "rope_scaling": {"type": "mrope", "mrope_section": sections},
        "use_sliding_window": False,
        "sliding_window": 64,
        "max_window_layers": 4,
    }


def test_first_configs_of_qwen2_5_vl(oracle: Callable[[str], Oracle], tmp_path: Path) -> None:
    folder, prompt, expected = oracle("qwen2_5_vl")
    copy = rewritten(folder, tmp_path / "flat", released_qwen2_5_vl(config_of(folder)), {})
    network = loaded(copy)
    assert network.config.rope == read_model(folder).rope
    assert difference(Runner(network).feed(rows(0, prompt.tolist(), 0, N_PROMPT)), expected) < 1e-4
    with torch.inference_mode():
        assert difference(theirs(copy)(prompt[None]).logits[0], expected) < 1e-4


NAMES: dict[str, list[dict[str, str]]] = {
    "qwen2_5_vl": [{"model.": "model.language_model.", "visual.": "model.visual."}],
    "qwen3_vl": [
        {"model.language_model.": "model.", "model.visual.": "visual."},
        {"model.language_model.": "language_model.model.", "model.visual.": "visual."},
    ],
    "qwen3_vl_moe": [{"model.language_model.": "model.", "model.visual.": "visual."}],
    "mistral3": [
        {
            "language_model.model.": "model.language_model.",
            "language_model.lm_head.": "lm_head.",
            "vision_tower.": "model.vision_tower.",
            "multi_modal_projector.": "model.multi_modal_projector.",
        }
    ],
}


@pytest.mark.parametrize("variant", NAMES)
def test_other_names_of_the_same_tensors(
    oracle: Callable[[str], Oracle], variant: str, tmp_path: Path
) -> None:
    folder, prompt, expected = oracle(variant)
    for i, names in enumerate(NAMES[variant]):
        copy = rewritten(folder, tmp_path / str(i), config_of(folder), names)
        logits = Runner(loaded(copy)).feed(rows(0, prompt.tolist(), 0, N_PROMPT))
        assert difference(logits, expected) < 1e-4


@pytest.mark.parametrize("variant", PLAIN)
def test_tensors_of_the_text_model_are_all_accounted_for(
    oracle: Callable[[str], Oracle], variant: str, tmp_path: Path
) -> None:
    folder, _, _ = oracle(variant)
    stored = [
        name
        for name in load_file(folder / "model.safetensors")
        if name.endswith("layers.2.input_layernorm.weight")
    ]
    assert len(stored) == 1
    with pytest.raises(CheckpointMismatch, match=r"missing: \S*layers\.2\.input_layernorm\.weight"):
        loaded(edited(folder, tmp_path / "1", lambda all: all.pop(stored[0])))
    surplus = stored[0].replace("layers.2", "layers.9")
    with pytest.raises(CheckpointMismatch, match=r"unused: \S*layers\.9\.input_layernorm\.weight"):
        loaded(edited(folder, tmp_path / "2", lambda all: all.update({surplus: torch.ones(64)})))
    tower = next(name for name in load_file(folder / "model.safetensors") if "vis" in name)
    loaded(edited(folder, tmp_path / "3", lambda all: all.pop(tower)))


def test_experts_as_they_were_released(oracle: Callable[[str], Oracle], tmp_path: Path) -> None:
    """Inputs before outputs, as transformers turns them too."""
    folder, prompt, expected = oracle("qwen3_vl_moe")

    def turn(tensors: dict[str, Tensor]) -> None:
        for name, one in tensors.items():
            if ".experts." in name:
                tensors[name] = one.transpose(1, 2).contiguous()

    copy = edited(folder, tmp_path / "turned", turn)
    with torch.inference_mode():
        assert difference(theirs(copy)(prompt[None]).logits[0], expected) < 1e-4
    assert difference(Runner(loaded(copy)).feed(rows(0, prompt.tolist(), 0, N_PROMPT)), expected) < 1e-4

    def turn_half(tensors: dict[str, Tensor]) -> None:
        name = "model.language_model.layers.0.mlp.experts.down_proj"
        tensors[name] = tensors[name].transpose(1, 2).contiguous()

    with pytest.raises(LoadError, match=r"gate_up_proj has shape \[8, 96, 64\]"):
        loaded(edited(folder, tmp_path / "half", turn_half))


def test_square_experts_as_they_were_released(tmp_path: Path) -> None:
    """Where gates and ups together are as wide as the stream, only the way back says how they lie."""
    folder = tiny_checkpoint("qwen3_vl_moe", tmp_path / "plain", changes={"moe_intermediate_size": 32})

    def turn(tensors: dict[str, Tensor]) -> None:
        for name, one in tensors.items():
            if ".experts." in name:
                tensors[name] = one.transpose(1, 2).contiguous()

    one, two = (
        Runner(loaded(path)).feed(rows(0, list(range(40)), 0, 40))
        for path in (folder, edited(folder, tmp_path / "turned", turn))
    )
    assert torch.equal(one, two)


def test_tying_that_only_the_text_model_asks_for(oracle: Callable[[str], Oracle], tmp_path: Path) -> None:
    """Files of transformers before version 5 say it there, and the wrapper's default beside it."""
    folder, prompt, expected = oracle("qwen2_5_vl, tied")
    copy = with_config(folder, tmp_path / "inner", tie_word_embeddings=False)
    assert config_of(copy)["text_config"]["tie_word_embeddings"] is True
    with torch.inference_mode():
        assert difference(theirs(copy)(prompt[None]).logits[0], expected) < 1e-4
    assert difference(Runner(loaded(copy)).feed(rows(0, prompt.tolist(), 0, N_PROMPT)), expected) < 1e-4


REFUSED: list[tuple[str, str, dict[str, Any]]] = [
    ("qwen2_5_vl", "mrope_section", {"mrope_section": [2, 3, 4]}),
    ("qwen2_5_vl", "mrope_section", {"mrope_section": [4, 4]}),
    ("qwen2_5_vl", "mrope_interleaved", {"mrope_interleaved": True}),
    ("qwen3_vl", "mrope_section", {"mrope_section": [6, "5", 5]}),
    ("qwen3_vl", "mrope_interleaved", {"mrope_interleaved": False}),
    ("qwen3_vl", "llama_4_scaling_beta", {**GROWING, "mrope_section": [6, 5, 5]}),
    ("mistral3", "llama_4_scaling_beta", {"llama_4_scaling_beta": 0.1}),
    ("ministral3", "llama_4_scaling_beta", {"rope_type": "default"}),
]


@pytest.mark.parametrize(("variant", "key", "changes"), REFUSED)
def test_rotations_that_are_refused(
    oracle: Callable[[str], Oracle], variant: str, key: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    folder, _, _ = oracle(variant)
    config = config_of(folder)
    text = config.get("text_config", config)
    text["rope_parameters"] = {**text["rope_parameters"], **changes}
    with pytest.raises(UnsupportedModel, match=key):
        read_model(rewritten(folder, tmp_path / "copy", config, {}))


def test_what_does_not_fit_is_refused(oracle: Callable[[str], Oracle], tmp_path: Path) -> None:
    def changed(variant: str, **changes: Any) -> Path:
        config = config_of(oracle(variant)[0])
        config["text_config"] = {**config["text_config"], **changes}
        return rewritten(oracle(variant)[0], tmp_path / f"{variant} {changes}", config, {})

    with pytest.raises(UnsupportedModel, match="norm_topk_prob"):
        loaded(changed("qwen3_vl_moe", norm_topk_prob=False))
    with pytest.raises(UnsupportedModel, match="model_type"):
        loaded(changed("mistral3", model_type="llama"))
    with pytest.raises(UnsupportedModel, match="rope_parameters"):
        loaded(changed("mistral3 of ministral3", rope_parameters=None))
    with pytest.raises(UnsupportedModel, match="rope_parameters"):
        loaded(with_config(oracle("ministral3")[0], tmp_path / "ministral3", rope_parameters=None))
    with pytest.raises(UnsupportedModel, match="num_experts"):
        loaded(changed("qwen3_vl", num_experts=8))


@pytest.mark.parametrize("family", ["mistral3", "mistral3 of ministral3", "ministral3"])
def test_an_epsilon_that_is_left_out_is_what_transformers_assumes(
    oracle: Callable[[str], Oracle], family: str, tmp_path: Path
) -> None:
    config = config_of(oracle(family)[0])
    config.get("text_config", config)["rms_norm_eps"] = None
    copy = rewritten(oracle(family)[0], tmp_path / "copy", config, {})
    assert read_model(copy).norm_eps == (1e-6 if family == "mistral3" else 1e-5)
