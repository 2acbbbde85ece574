"""A network drawn from its config alone has the parameters and the needs of the one that its files make."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.models.blueprint import draw, draw_mtp, mtp_layers
from engine.models.mtp import load_mtp
from engine.models.registry import load_network, read_model
from tests import head_checkpoints as heads
from tests.checkpoints import FAMILIES, tiny_checkpoint

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _selected_here(_selected: None) -> None:
    """The ops of this machine, chosen for the dtypes that the tests use."""


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family(tmp_path: Path, family: str, dtype: torch.dtype) -> None:
    folder = tiny_checkpoint(family, tmp_path)
    loaded, drawn = load_network(folder, dtype, CPU, 100), draw(read_model(folder), dtype)
    assert drawn.n_params == loaded.n_params
    assert drawn.needs == loaded.needs
    assert drawn.weight_bytes == pytest.approx(loaded.weight_bytes, rel=0.02)  # some parts are always float32
    tables = [table for rope in loaded.decoder.ropes.values() for table in (rope.cos, rope.sin)]
    assert 100 * drawn.position_bytes == sum(table.nbytes for table in tables)


@pytest.mark.parametrize(
    ("family", "head", "changes"),
    [
        ("qwen3", heads.mtp_deepseek("model.layers.4.", 1, head_norms=True, d_head=32), {}),
        ("qwen2", heads.mtp_mimo(1), {}),
    ],
)
def test_mtp_layers(tmp_path: Path, family: str, head: heads.Tensors, changes: dict[str, Any]) -> None:
    shape = {"intermediate_size": heads.D_FFN, **changes}
    folder = heads.add_tensors(tiny_checkpoint(family, tmp_path, changes=shape), head)
    target = load_network(folder, torch.float32, CPU, 100)
    loaded, drawn = load_mtp(folder, target, 100), draw_mtp(read_model(folder), torch.float32, 1)
    assert drawn.n_params == loaded.n_params
    assert drawn.needs == loaded.needs
    both = draw_mtp(read_model(folder), torch.float32, 2)
    assert (both.n_params, len(both.needs)) == (2 * loaded.n_params, 2)


@pytest.mark.parametrize(
    ("keys", "n"),
    [({}, 0), ({"num_nextn_predict_layers": 2}, 2), ({"mtp_num_hidden_layers": 1}, 1)],
)
def test_layers_that_a_config_speaks_of(tmp_path: Path, keys: dict[str, int], n: int) -> None:
    folder = tiny_checkpoint("qwen2", tmp_path)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **keys}))
    assert mtp_layers(read_model(folder)) == n
