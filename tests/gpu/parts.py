"""The parts of `make gpu`, in the order of what is wanted first where the time ends early, and the time of each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Part:
    """Cases of one module of this folder."""

    module: str  # with `cases(setting)` and `run(setting, case)`
    seconds: float  # it may take; behind them it is cut short
    cases: str = ""  # a pattern for the beginnings of their names; empty: all of them


PARTS: Mapping[str, Part] = {
    "machine": Part("machine", 5, "versions|device"),
    "selfcheck": Part("selfcheck", 60),  # compiles on all cores
    "chosen": Part("machine", 10, "implementations"),  # finds them compiled
    "ceilings": Part("ceilings", 12),
    "plain": Part("tokens", 70, "build|plain$|profile"),
    "parity": Part("parity", 60, "(ngram|verify) |.* bfloat16"),
    "width": Part("width", 30, ".* bfloat16"),
    "replays": Part("lossless", 55, "replays|overlapping"),
    "speed": Part("speed", 55),
    "prompts": Part("tokens", 25, "prompt"),
    "drafts": Part("tokens", 55, "streams"),
    "transformers": Part("generate", 30, "transformers$"),
    "sanitizer": Part("sanitizer", 45),
    "counters": Part("counters", 15),
    # What the time that others have left is for, or a second run with --only.
    "lossless": Part("lossless", 80, "drafting|as on"),
    "chains": Part("tokens", 60, "plain,|ngram|draft-model"),
    "passes": Part("tokens", 60, "width|context|host"),
    "parity-wide": Part("parity", 90, "(?!ngram|verify).* float"),
    "width-wide": Part("width", 60, ".* float"),
    "transformers-static": Part("generate", 150, ".*static"),  # compiles
}
TOTAL_S = 530.0  # of the whole run
GRACE_S = 12.0  # past its time a part is not asked any more but killed
