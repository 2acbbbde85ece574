"""The table of families in docs/models.md: `python -m tests.bench.model_table docs/models.md [--check]`.

Sizes are those of released configs (`tests/public_configs.py`): weights in 16 bits, and the cache of one sequence, as
`slipstream plan` counts them.
"""

from __future__ import annotations

import json
import sys
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

from slipstream.engine.models.blueprint import draw
from slipstream.engine.models.registry import FAMILIES, read_model
from slipstream.server.describe.renewal import renew
from tests.public_configs import CONFIGS

HEADER = (
    "| released models | architecture | example | 16-bit weights | cache, 32k tokens | heads | proven by |"
)
N_TOKENS = 32_768


@dataclass(frozen=True, slots=True)
class Row:
    """One line: models of one architecture, or of several that differ in little."""

    models: str
    architectures: tuple[str, ...]
    example: str  # of CONFIGS
    heads: str  # that are made for them, beside draft models and what reads text
    proven: str  # file below tests/oracle, against transformers


ROWS = (
    Row("Llama 3.x, Mistral", ("Llama", "Mistral"), "Llama-3.1-8B", "EAGLE-3", "models"),
    Row("Qwen2, Qwen2.5, MiMo-7B", ("Qwen2", "MiMo"), "Qwen2.5-7B", "EAGLE-3, MTP (MiMo)", "models"),
    Row("MiMo-V2-Flash", ("MiMoV2Flash",), "MiMo-V2-Flash", "MTP (3 layers)", "mimo_v2_flash"),
    Row("Qwen3", ("Qwen3",), "Qwen3-8B", "EAGLE-3, DFlash, DSpark", "models"),
    Row("Qwen2.5-VL", ("Qwen2_5_VL",), "Qwen2.5-VL-7B", "EAGLE-3", "media_models"),
    Row("Qwen3-VL", ("Qwen3VL",), "Qwen3-VL-8B", "EAGLE-3", "media_models"),
    Row("Qwen3-VL with experts", ("Qwen3VLMoe",), "Qwen3-VL-30B-A3B", "EAGLE-3", "media_models"),
    Row(
        "Mistral-Small-3.1, 3.2, Ministral 3",
        ("Mistral3", "Ministral3"),
        "Mistral-Small-3.2-24B",
        "EAGLE-3",
        "media_models",
    ),
    Row("Qwen3 with experts", ("Qwen3Moe",), "Qwen3-30B-A3B", "EAGLE-3, DFlash", "moe_models"),
    Row("Qwen3-Next", ("Qwen3Next",), "Qwen3-Next-80B-A3B", "MTP", "hybrid_models"),
    Row("Qwen3.5, 3.6", ("Qwen3_5",), "Qwen3.5-27B", "MTP, DFlash", "hybrid_models"),
    Row("Qwen3.5, 3.6 with experts", ("Qwen3_5Moe",), "Qwen3.5-35B-A3B", "MTP, DFlash", "hybrid_models"),
    Row("GLM-4.5, 4.6, 4.7", ("Glm4Moe",), "GLM-4.5-Air", "MTP", "moe_models"),
    Row("GLM-4.7-Flash", ("Glm4MoeLite",), "GLM-4.7-Flash", "MTP", "moe_models"),
    Row("DeepSeek-V2-Lite", ("DeepseekV2",), "DeepSeek-V2-Lite", "", "moe_models"),
    Row("DeepSeek-V3, R1, V3.1", ("DeepseekV3",), "DeepSeek-V3", "MTP", "moe_models"),
    Row("Kimi-K2", ("DeepseekV3",), "Kimi-K2", "EAGLE-3", "moe_models"),
    Row("Kimi-Linear", ("KimiLinear",), "Kimi-Linear-48B-A3B", "", "hybrid_models"),
    Row(
        "Step-3.5-Flash, Step-3.7-Flash",
        ("Step3p5", "Step3p7"),
        "Step-3.5-Flash",
        "MTP (3 layers)",
        "step3p5",
    ),
    Row("Gemma 3", ("Gemma3",), "Gemma-3-1B", "", "gemma3"),
    Row("Gemma 4, dense and with experts", ("Gemma4",), "Gemma-4-31B", "assistant", "gemma4"),
    Row("gpt-oss", ("GptOss",), "gpt-oss-20b", "EAGLE-3", "gpt_oss"),
)


def table() -> str:
    """The table, header included."""
    lines = [HEADER, "|---|---|---|---|---|---|---|"]
    for row in ROWS:
        weights, cached = sizes(row.example)
        heads = row.heads or "–"
        names = ", ".join(f"`{name}…`" for name in row.architectures)
        proven = f"[test_{row.proven}.py](../tests/oracle/test_{row.proven}.py)"
        lines.append(
            f"| {row.models} | {names} | {row.example} | {size(weights)} | {size(cached)} | {heads} | {proven} |"
        )
    return "\n".join(lines)


@cache
def sizes(name: str) -> tuple[int, int]:
    """Bytes of a released model's weights in 16 bits, and of the cache of one sequence."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "config.json")
        path.write_text(json.dumps(CONFIGS[name]))
        outline = draw(read_model(path), torch.bfloat16)
    dtype = torch.bfloat16
    each = sum(need.token_bytes(dtype) for need in outline.needs)
    windows = sum(need.window_bytes(dtype) * (need.window or 0) for need in outline.needs)
    return 2 * outline.n_params, each * N_TOKENS + windows + sum(
        need.slot_bytes(dtype) for need in outline.needs
    )


def size(n_bytes: int) -> str:
    """In GB, with as many digits as say something."""
    value = n_bytes / 1e9
    return f"{value:.{0 if value >= 100 else 1 if value >= 1 else 2}f} GB"


def updated(text: str) -> str:
    """The text with its table renewed. Raises ValueError if there is none."""
    before, header, rest = text.partition(HEADER)
    if not header:
        raise ValueError(f"no table that begins with {HEADER}")
    return before + table() + "\n\n" + rest.partition("\n\n")[2]


def listed() -> set[str]:
    """Architectures that are in the table, without what follows their stem."""
    return {name for row in ROWS for name in row.architectures}


def known() -> set[str]:
    return {name.partition("For")[0] for name in FAMILIES}


if __name__ == "__main__":
    sys.exit(renew(sys.argv[1:], updated))
