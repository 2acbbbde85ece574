"""Write from a small trained checkpoint a big one that computes the same function, to measure speed at real size.

    python -m tests.bench.inflate demo/target /tmp/big --hidden 1024 --layers 28 --ffn 3072 --heads 16 --kv-heads 8
    python -m tests.bench.inflate demo/hybrid /tmp/big --hidden 1280 --layers 24 --ffn 3584 --heads 8 --kv-heads 2 \\
        --linear-key-heads 16 --linear-value-heads 16

Works for checkpoints in one safetensors file: Llama, Mistral, Qwen2 and Qwen3 as `inflate_dense` describes it, and
Qwen3.5 with its MTP layer as `inflate_hybrid` does. Sizes that are not given stay. The tokenizer gets as many
unreachable tokens as the vocabulary gets rows.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import time
from collections.abc import Sequence
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from tests.bench.inflate_dense import Entry, Inflation, Shape
from tests.bench.inflate_hybrid import HybridInflation, HybridShape

DTYPE_NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
DTYPE_NAMES |= {torch.int64: "I64", torch.bool: "BOOL"}
INFLATIONS: dict[str, type[Inflation]] = {
    "LlamaForCausalLM": Inflation,
    "MistralForCausalLM": Inflation,
    "Qwen2ForCausalLM": Inflation,
    "Qwen3ForCausalLM": Inflation,
    "Qwen3_5ForCausalLM": HybridInflation,
}


def write_safetensors(path: Path, entries: Sequence[Entry]) -> None:
    """Write tensors one after the other, each made only when its turn comes."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    start = 0
    for one in entries:
        end = start + math.prod(one.shape) * one.dtype.itemsize
        header[one.name] = {
            "dtype": DTYPE_NAMES[one.dtype],
            "shape": list(one.shape),
            "data_offsets": [start, end],
        }
        start = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for one in entries:
            tensor = one.make().to(one.dtype).contiguous()
            assert tensor.shape == one.shape, f"{one.name}: {tuple(tensor.shape)} is not {one.shape}"
            file.write(tensor.flatten().view(torch.uint8).numpy().data)


def extend_tokenizer(path: Path, n_tokens: int) -> None:
    """Fill a tokenizer.json up to `n_tokens` ids with tokens that no text becomes: words keep no plain space."""
    data = json.loads(path.read_text())
    vocab = data["model"]["vocab"]
    taken = [*vocab.values(), *(one["id"] for one in data.get("added_tokens", []))]
    vocab |= {f"unused {i}": i for i in range(max(taken) + 1, n_tokens)}
    path.write_text(json.dumps(data, ensure_ascii=False))


def inflate(source: Path, target: Path, sizes: dict[str, int], seed: int = 0) -> Shape:
    """Write the inflated checkpoint; sizes not given stay. Raises ValueError for sizes that cannot work."""
    config = json.loads((source / "config.json").read_text())
    (architecture,) = config["architectures"]
    if architecture not in INFLATIONS:
        raise ValueError(f"{source}: {architecture} is none of {', '.join(INFLATIONS)}")
    kind = INFLATIONS[architecture]
    old = kind.read_shape(config)
    foreign = sizes.keys() - asdict(old).keys()
    if foreign:
        raise ValueError(f"{source}: {architecture} has no {', '.join(sorted(foreign))}")
    inflation = kind(config, load_file(source / "model.safetensors"), replace(old, **sizes), seed)
    target.mkdir(parents=True, exist_ok=True)
    write_safetensors(target / "model.safetensors", list(inflation.entries()))
    (target / "config.json").write_text(json.dumps(inflation.new_config(), indent=2) + "\n")
    for name in ("generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        if (source / name).exists():
            shutil.copyfile(source / name, target / name)
    if inflation.new.vocab > old.vocab and (target / "tokenizer.json").exists():
        extend_tokenizer(target / "tokenizer.json", inflation.new.vocab)
    return inflation.new


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("source", type=Path)
    parser.add_argument("target", type=Path)
    names = [field.name for field in fields(HybridShape)]
    for name in names:
        parser.add_argument(f"--{name.replace('_', '-')}", type=int)
    parser.add_argument("--seed", type=int, default=0)
    given = vars(parser.parse_args())
    sizes = {name: given[name] for name in names if given[name] is not None}
    start = time.perf_counter()
    new = inflate(given["source"], given["target"], sizes, given["seed"])
    size = (given["target"] / "model.safetensors").stat().st_size
    print(f"{new}: {size / 2**20:.0f} MiB in {time.perf_counter() - start:.1f} s")


if __name__ == "__main__":
    main()
