"""Losslessness with images: what `lossless.py` does, of prompts that hold pictures.

    python -m tests.oracle.lossless_images [--family qwen3_vl …] [--dtype float32 bfloat16] [--cases 12]

Every chain of drafters on every bench, with cancels, preemption and saved slots, against plain decoding alone.
The draft model is the target with noise, in the part that sees images too.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from tests.assistant_checkpoint import assistant_checkpoint
from tests.checkpoints import noised_copy
from tests.oracle.image_cases import Eyes, image_cases
from tests.oracle.lab import Bench, Folders, Lab, play
from tests.oracle.lossless import ASSISTANT, SAMPLINGS, Tally, benches, chains, disturbed, lab_of, line
from tests.oracle.test_hybrid_mtp import with_mtp
from tests.tiny_vision import VARIANTS, tiny_vision

FREE = ("greedy", "warm", "all")  # kinds of sampling without grammars


def folders_of(variant: str, scratch: Path) -> Folders:
    """A model that sees images, its noised twin, and for Gemma 4 an assistant, for Qwen3.5 an MTP layer of its own."""
    target = tiny_vision(variant, scratch / "target")
    draft = noised_copy(target, scratch / "draft", 0.02)
    heads = {}
    if variant.startswith("gemma4"):
        heads[ASSISTANT] = assistant_checkpoint(target, scratch / "assistant")
    if variant == "qwen3_5":
        with_mtp(variant, target)
        heads["draft-mtp"] = target
    return Folders(target, draft, heads)


def compare(lab: Lab, name: str, n_cases: int, seed: int) -> Iterator[tuple[Bench, Tally]]:
    """Every chain on every bench."""
    eyes = Eyes(lab.folders, lab.target.dtype)
    try:
        cases = image_cases(eyes, SAMPLINGS[name], n_cases, seed)
    finally:
        eyes.close()
    expected = play(lab, Bench(), cases, seed=seed)
    for i, bench in enumerate(bench for chain in chains(lab.folders) for bench in benches(chain)):
        bench = replace(bench, now=time.perf_counter)
        yield bench, disturbed(lab, bench, cases, expected, 100 * seed + i)


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--family", nargs="*", default=list(VARIANTS), choices=list(VARIANTS))
    parser.add_argument("--dtype", nargs="*", default=["float32", "bfloat16"])
    parser.add_argument("--cases", type=int, default=12)
    parser.add_argument("--sampling", nargs="*", default=FREE, choices=FREE)
    parser.add_argument("--ranks", type=int, default=1, help="over which the target is divided, as threads")
    options = parser.parse_args(arguments)
    started, total = time.perf_counter(), Tally()
    for variant in options.family:
        of_family = Tally()
        with tempfile.TemporaryDirectory() as scratch:
            folders = folders_of(variant, Path(scratch))
            for dtype in options.dtype:
                lab = lab_of(folders, getattr(torch, dtype), options.ranks)
                for seed, name in enumerate(options.sampling):
                    for _, found in compare(lab, name, options.cases, seed):
                        of_family.add(found)
        sys.stdout.write(f"{line(of_family)}  {variant}, {time.perf_counter() - started:.0f} s\n")
        sys.stdout.flush()
        total.add(of_family)
    sys.stdout.write(f"{line(total)}  total\n")
    return 1 if total.n_wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
