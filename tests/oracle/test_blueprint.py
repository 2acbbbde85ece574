"""A network drawn from its config alone has the parameters and the needs of the one that its files make."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from slipstream.engine.models.blueprint import draw, draw_mtp, mtp_layers
from slipstream.engine.models.heads.mtp import DEEPSEEK, MIMO, QWEN, Names, load_mtp
from slipstream.engine.models.registry import load_network, read_model
from tests.checkpoints import tiny_checkpoint
from tests.gguf_files import gguf_of
from tests.head_checkpoints import add_tensors
from tests.tiny_families import FAMILIES

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _selected_here(_selected: None) -> None:
    """The ops of this machine, chosen for the dtypes that the tests use."""


@pytest.mark.sampled(keep=16)
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


@pytest.mark.parametrize("kind", ["Q4_0", "Q8_0", "Q4_1"])
@pytest.mark.parametrize("tied", [True, False])
def test_matrices_of_a_gguf_file_on_cuda(tmp_path: Path, kind: str, tied: bool) -> None:
    """Narrow where products read the type, the embedding never; a tied head takes room of its own."""
    folder = tiny_checkpoint("llama", tmp_path, changes={"tie_word_embeddings": tied})
    gguf_of(folder).as_type(kind).write(tmp_path / "model.gguf")
    config = read_model(tmp_path / "model.gguf")
    shapes = {name: tensor.shape for name, tensor in load_file(folder / "model.safetensors").items()}
    if tied:
        shapes["lm_head.weight"] = shapes["model.embed_tokens.weight"]
    each = {"Q4_0": 0.625, "Q8_0": 1.125}.get(kind, 2)  # bytes of a value, with its part of a scale
    wide = [math.prod(one) for name, one in shapes.items() if len(one) < 2 or "embed" in name]
    narrow = [math.prod(one) for name, one in shapes.items() if len(one) == 2 and "embed" not in name]
    drawn = draw(config, torch.bfloat16, torch.device("cuda"))
    assert drawn.weight_bytes == 2 * sum(wide) + each * sum(narrow)
    assert drawn.n_params == sum(wide) + sum(narrow) - tied * math.prod(shapes["lm_head.weight"])


# Where a family's head lies, and which of the target's blocks is of its kind.
HEADS = {
    "qwen3": (DEEPSEEK, 3),
    "glm4_moe": (DEEPSEEK, 3),
    "deepseek_v3": (DEEPSEEK, 3),
    "qwen2": (MIMO, 3),
    "qwen3_5": (QWEN, 2),
    "qwen3_5_moe": (QWEN, 2),
    "qwen3_next": (QWEN, 2),
}


def add_head(folder: Path, names: Names, like: int) -> None:
    """Add an MTP layer whose block repeats block `like` of the target."""
    tensors = load_file(folder / "model.safetensors")
    prefix, block = f"model.layers.{like}.", names.block.replace("{i}", "4")
    head = {
        f"{block}.{name.removeprefix(prefix)}": tensor
        for name, tensor in tensors.items()
        if name.startswith(prefix)
    }
    for norm in (names.token_norm, names.hidden_norm, names.norm):
        head[f"{norm.replace('{i}', '4')}.weight"] = torch.ones(64)
    head[f"{names.joint.replace('{i}', '4')}.weight"] = torch.ones(64, 128)
    add_tensors(folder, head)


@pytest.mark.parametrize("family", HEADS)
def test_mtp_layers(tmp_path: Path, family: str) -> None:
    names, like = HEADS[family]
    folder = tiny_checkpoint(family, tmp_path)
    add_head(folder, names, like)
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
