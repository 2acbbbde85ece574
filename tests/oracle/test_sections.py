"""Whose position turns a frequency, and angles of rows that stand at three, to the bit as transformers has them."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLRotaryEmbedding
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5TextRotaryEmbedding
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLTextRotaryEmbedding
from transformers.models.qwen3_vl_moe.modeling_qwen3_vl_moe import Qwen3VLMoeTextRotaryEmbedding

from slipstream.engine.layers.rope import RopeSpec, axis_of, mixed_angles, rope_tables
from slipstream.engine.models.registry import read_model
from tests.public_configs import CONFIGS

N_POSITIONS, CPU = 3000, torch.device("cpu")
# Released models, and what turns in transformers.
ROTARY: dict[str, Callable[..., torch.nn.Module]] = {
    "Qwen2.5-VL-7B": Qwen2_5_VLRotaryEmbedding,
    "Qwen3-VL-8B": Qwen3VLTextRotaryEmbedding,
    "Qwen3-VL-30B-A3B": Qwen3VLMoeTextRotaryEmbedding,
    "Qwen3.5-27B": Qwen3_5TextRotaryEmbedding,
}
MODEL_TYPES = {
    "Qwen2.5-VL-7B": "qwen2_5_vl",
    "Qwen3-VL-8B": "qwen3_vl",
    "Qwen3-VL-30B-A3B": "qwen3_vl_moe",
    "Qwen3.5-27B": "qwen3_5",
}
VARIANTS: dict[str, dict[str, Any]] = {  # what to change in the keys of the rotation
    "as released": {},
    "silent": {"mrope_section": None, "mrope_interleaved": None},
    "squeezed": {"rope_type": "linear", "factor": 4.0},
}


def written(name: str, folder: Path, changes: dict[str, Any]) -> Path:
    """The config of a released model, changed."""
    config: dict[str, Any] = json.loads(json.dumps(CONFIGS[name]))
    config["model_type"] = MODEL_TYPES[name]
    config.get("vision_config", {}).pop("hidden_size", None)
    text = config.get("text_config", config)
    key = "rope_parameters" if "rope_parameters" in text else "rope_scaling"
    rope = {**text[key], **changes}
    if "rope_type" in changes:
        rope.pop("type", None)
    text[key] = {name: value for name, value in rope.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def three_axes(n_rows: int) -> Tensor:  # [3, n_rows]
    """Positions of text, then of two images, then any."""
    axes = torch.randint(0, N_POSITIONS, (3, n_rows), generator=torch.Generator().manual_seed(3))
    axes[:, :5] = torch.arange(5)
    axes[0, 5:17], axes[1, 5:17], axes[2, 5:17] = 5, 5 + torch.arange(12) // 4, 5 + torch.arange(12) % 4
    return axes


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("name", ROTARY)
def test_angles_are_those_of_transformers(name: str, variant: str, tmp_path: Path) -> None:
    path = written(name, tmp_path, VARIANTS[variant])
    spec = read_model(path).rope
    assert sum(spec.sections) == spec.n_dims // 2
    axes = three_axes(200)
    theirs = ROTARY[name](AutoConfig.from_pretrained(path).get_text_config())
    expected = theirs(torch.zeros(1), axes[:, None])  # cos, sin: [1, 200, n_dims], two equal halves
    tables = rope_tables(spec, N_POSITIONS, CPU)
    angles = mixed_angles(tables, spec, axes)
    for ours, one in zip(angles, expected, strict=True):
        assert torch.equal(torch.cat((ours, ours), -1), one[0])
    wrong = mixed_angles(tables, replace(spec, interleaved=not spec.interleaved), axes)
    assert not torch.equal(wrong[0], angles[0])


@pytest.mark.parametrize("name", ROTARY)
def test_rows_of_text_are_rows_of_the_tables(name: str, tmp_path: Path) -> None:
    spec = read_model(written(name, tmp_path, {})).rope
    positions = torch.randint(0, N_POSITIONS, (50,), generator=torch.Generator().manual_seed(4))
    tables = rope_tables(spec, N_POSITIONS, CPU)
    for ours, table in zip(mixed_angles(tables, spec, positions.expand(3, -1)), tables, strict=True):
        assert torch.equal(ours, table[positions])
    assert rope_tables(spec.of_text, N_POSITIONS, CPU)[0].equal(tables[0])


def test_axes_of_frequencies() -> None:
    def axes(n_dims: int, sections: Sequence[int], *, interleaved: bool = False) -> list[int]:
        spec = RopeSpec(
            kind="default", theta=1e4, n_dims=n_dims, sections=tuple(sections), interleaved=interleaved
        )
        return axis_of(spec).tolist()

    assert axes(16, ()) == [0] * 8
    assert axes(16, (2, 3, 3)) == [0, 0, 1, 1, 1, 2, 2, 2]
    assert axes(16, (4, 2, 2), interleaved=True) == [0, 1, 2, 0, 1, 2, 0, 0]
    assert axes(16, (3, 3, 2), interleaved=True) == [0, 1, 2, 0, 1, 2, 0, 1]
    assert axes(16, (7, 0, 1), interleaved=True) == [0, 0, 2, 0, 0, 0, 0, 0]
