"""What images cost: the time to the first token of an image shown again, and text beside a load of images.

    python -m tests.bench.image_load [--pairs 11] [--seconds 6]

A random checkpoint in the shape of Qwen3-VL, some 0.15 B in bfloat16 with a tower of 0.1 B, in this process. An image
that was never shown alternates with the same shown again; text alone alternates with text beside two streams of
requests that each show an image never shown before. Medians of the pairs count. Run it with nothing beside it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from itertools import count
from pathlib import Path

import torch

from slipstream.engine.api import Chat, Delta, Image, Request, Sampling
from slipstream.engine.service.run.thread import ThreadEngine
from slipstream.engine.service.start.launch import launch
from slipstream.engine.settings import Settings
from slipstream.server.vision.opening import open_vision
from tests.bench.bars import bandwidth
from tests.checkpoints import SENTENCES
from tests.oracle.image_cases import IMAGE, picture
from tests.tiny_vision import write_tokenizer
from tests.vision_families import TINY, VOCAB

FAMILY = "qwen3_vl"
SIDE = 448  # pixels: 196 tokens of 32 pixels square
TEXT = {
    "hidden_size": 1024,
    "num_hidden_layers": 12,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "intermediate_size": 3072,
    "vocab_size": VOCAB,
    "max_position_embeddings": 4096,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1e6,
        "mrope_interleaved": True,
        "mrope_section": [24, 20, 20],
    },
}
TOWER = {
    "depth": 12,
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_heads": 12,
    "patch_size": 16,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "out_hidden_size": 1024,
    "num_position_embeddings": 2304,
    "deepstack_visual_indexes": [3, 6, 9],
}
FIRST_BAR, BESIDE_BAR = 0.3, 0.8


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def checkpoint(folder: Path) -> Path:
    """The random model's files."""
    tiny = TINY[FAMILY]
    torch.manual_seed(0)
    model = tiny.model(tiny.config(TEXT, TOWER, tiny.outer)).to(torch.bfloat16)
    model.save_pretrained(folder)
    write_tokenizer(folder, tiny)
    sizes = {"shortest_edge": 32 * 32, "longest_edge": 1024 * 1024}
    told = {"image_processor_type": "Qwen2VLImageProcessor", "patch_size": 16, "merge_size": 2, "size": sizes}
    (folder / "preprocessor_config.json").write_text(json.dumps(told))
    return folder


class Asking:
    """Requests to one engine."""

    def __init__(self, engine: ThreadEngine) -> None:
        self._engine = engine
        self._numbers = count(1)

    async def ask(self, images: Sequence[Image], n_tokens: int, text: str) -> tuple[float, int]:
        """Seconds to the first token, and the tokens that came."""
        content = [*[IMAGE] * len(images), {"type": "text", "text": text}]
        chat = Chat([{"role": "user", "content": content}], images=tuple(images))
        sampling = Sampling(temperature=0.8, seed=1, ignore_eos=True)
        started, first, n = time.perf_counter(), 0.0, 0
        request = Request(id=str(next(self._numbers)), prompt=chat, sampling=sampling, max_tokens=n_tokens)
        async for event in await self._engine.submit(request):
            if isinstance(event, Delta):
                first = first or time.perf_counter() - started
                n += len(event.token_ids)
        return first, n

    def fresh(self) -> Image:
        return picture(SIDE, SIDE, 1000 + next(self._numbers))

    async def again(self) -> tuple[float, float]:
        """Seconds to the first token of an image never shown, and of the same shown again."""
        image = self.fresh()
        (first, _), (second, _) = [await self.ask([image], 1, "what is this?") for _ in range(2)]
        return first, second

    async def rate(self, seconds: float, *, beside: bool) -> tuple[float, int]:
        """Tokens a second of two streams of text, and images that were looked at meanwhile."""
        end = time.perf_counter() + seconds
        n_tokens = n_images = 0

        async def talk() -> None:
            nonlocal n_tokens
            while time.perf_counter() < end:
                _, n = await self.ask([], 64, SENTENCES[0][:40])
                n_tokens += n

        async def show() -> None:
            nonlocal n_images
            while time.perf_counter() < end:
                await self.ask([self.fresh()], 1, "what is this?")
                n_images += 1

        started = time.perf_counter()
        showing = [asyncio.create_task(show()) for _ in range(2 * beside)]
        await asyncio.gather(talk(), talk())
        taken = time.perf_counter() - started
        await asyncio.gather(*showing)
        return n_tokens / taken, n_images


async def measure(folder: Path, n_pairs: int, seconds: float) -> bool:
    """Whether both bars are met."""
    settings = Settings(model=str(folder), parallel=4, ctx_size=1024, spec_type="none")
    engine = launch(settings, open_vision)
    try:
        asking = Asking(engine)
        await asking.again()
        await asking.rate(1.0, beside=True)
        pairs = [await asking.again() for _ in range(n_pairs)]
        ratio = statistics.median(second / first for first, second in pairs)
        first, second = (1e3 * statistics.median(one) for one in zip(*pairs, strict=True))
        say(f"first token: {first:.0f} ms, shown again {second:.0f} ms: {ratio:.3f} x (bar {FIRST_BAR})")
        found = []
        for _ in range(n_pairs):
            alone, _ = await asking.rate(seconds, beside=False)
            beside, n_images = await asking.rate(seconds, beside=True)
            found.append((beside / alone, alone, beside, n_images / seconds))
        share, alone, beside, images = (statistics.median(one) for one in zip(*found, strict=True))
        say(
            f"text: {alone:.0f} tokens/s alone, {beside:.0f} beside {images:.2f} images/s:"
            f" {share:.3f} x (bar {BESIDE_BAR}; pairs {min(one[0] for one in found):.2f} to"
            f" {max(one[0] for one in found):.2f})"
        )
        return ratio <= FIRST_BAR and share >= BESIDE_BAR
    finally:
        await engine.close()


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pairs", type=int, default=11)
    parser.add_argument("--seconds", type=float, default=6.0)
    options = parser.parse_args(arguments)
    say(f"memory is read at {bandwidth() / 1e9:.1f} GB/s")
    with tempfile.TemporaryDirectory() as scratch:
        met = asyncio.run(measure(checkpoint(Path(scratch)), options.pairs, options.seconds))
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
