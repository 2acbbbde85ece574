"""Losslessness on the device: the tokens of plain decoding with every drafter, and in float64 those of the CPU.

In bfloat16 by the ops that were selected for it, which promise that a row's bits do not depend on its company; in
float64 by the references, where sums in another order flip no pick. Grammars are left out: they need llguidance.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import tempfile
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

import torch

from slipstream import kernels
from slipstream.engine.core.engine import Engine
from slipstream.engine.core.flight import Flight
from tests.gpu.setting import Finding, Findings, Setting
from tests.oracle.lab import Bench, Folders, Lab, play
from tests.oracle.lossless import KINDS, TEXT_DRAFTERS, chains, demo_cases, disturbed, folders_of
from tests.oracle.replays import compare_all_sizes, same_drafts

SAMPLINGS = ("greedy", "warm", "all")
CHAINS = (("ngram-simple",), ("draft-model",))  # and all drafters at once
QUICK_CHAINS = (("ngram-simple",), ("prediction", *TEXT_DRAFTERS))


def cases(setting: Setting) -> list[str]:
    kinds = setting.pick(KINDS, ("full",))
    drafting = [
        f"drafting {kind} {name}"
        for name, kind in itertools.product(setting.pick(SAMPLINGS, ("warm",)), kinds)
    ]
    before = [f"{name} {kind}" for kind in kinds for name in ("replays", "overlapping")]
    return [*before, *drafting, *(f"as on the CPU {kind}" for kind in kinds)]


def run(setting: Setting, case: str) -> Findings:
    if case.startswith("replays"):
        yield from replays(setting, case.split()[-1])
    elif case.startswith("overlapping"):
        yield from overlapping(setting, case.split()[-1])
    elif case.startswith("drafting"):
        _, kind, name = case.split()
        yield from drafting(setting, kind, name)
    else:
        yield as_on_the_cpu(setting, case.split()[-1])


@functools.cache
def folders(kind: str) -> Folders:
    """Checkpoints with one kind of cache; those that are written stay until the process ends."""
    own = Path(scratch().name) / kind
    own.mkdir()
    return folders_of(kind, own)


@functools.cache
def scratch() -> tempfile.TemporaryDirectory[str]:
    """Gone when the process ends."""
    return tempfile.TemporaryDirectory(prefix="slipstream-")


@functools.lru_cache(maxsize=2)
def lab(kind: str, dtype: torch.dtype, device: str) -> Lab:
    kernels.select(device, torch.float32)  # some layers compute in it
    return Lab(folders(kind), dtype, device=device)


def replays(setting: Setting, kind: str) -> Findings:
    """Captured passes against the passes themselves: every size, and what draft networks make of them."""
    one = lab(kind, setting.pick(torch.bfloat16, torch.float32), str(setting.device))
    if not any(need.is_recurrent for need in one.target.needs):  # a pass moves states; drafts show the rest
        wrong = compare_all_sizes(one)
        yield Finding(
            f"{kind}, replays of every size", ok=not wrong, figures={"sizes that differ": "; ".join(wrong)}
        )
    for name in setting.pick(("draft-model", *one.folders.heads), ("draft-model",)):
        n_accepted, same = same_drafts(one, (name,), setting.pick(6, 2))
        yield Finding(
            f"{kind}, {name} replayed", ok=same and n_accepted > 0, figures={"accepted": n_accepted}
        )


def overlapping(setting: Setting, kind: str) -> Findings:
    """Passes that are launched before the one before has been read, captured, against plain decoding in one slot.

    Networks guess ahead where all their layers have pages; drafts behind states or windows wait for the host.
    """
    one = lab(kind, setting.pick(torch.bfloat16, torch.float32), str(setting.device))
    asked = demo_cases(one, "warm", setting.pick(8, 2))  # noise is keyed by position
    expected = play(one, Bench(), asked)
    networks = (
        setting.pick(("draft-model", *[*one.folders.heads][:1]), ("draft-model",)) if kind == "full" else ()
    )
    for i, chain in enumerate([(), *((name,) for name in networks)]):
        bench = Bench(chain, n_slots=4, adaptive=False, captured=True, overlaps=True)
        with launched_ahead() as drafted:
            tally = disturbed(one, bench, asked, expected, i)
        told = {"tokens": tally.n_tokens, "accepted": tally.n_accepted, "requests that differ": tally.n_wrong}
        told |= {"passes launched ahead": len(drafted), "of them with drafts": sum(map(bool, drafted))}
        proven = any(drafted) and tally.n_accepted > 0 if chain else len(drafted) > 0
        yield Finding(
            f"{kind}, {chain[0] if chain else 'plain'}, overlapping",
            ok=proven and not tally.n_wrong,
            figures=told,
        )


@contextlib.contextmanager
def launched_ahead() -> Iterator[list[int]]:
    """Of every pass that is launched behind an unread pass inside the block, how many drafts it has."""
    launch, drafted = Engine._launch_behind, []

    def noted(self: Engine, unread: Flight, flight: Flight) -> Flight | None:
        launched = launch(self, unread, flight)
        if launched is not None and any(launched.works):
            drafted.append(sum(len(one.draft) for one in launched.planned))
        return launched

    with patch.object(Engine, "_launch_behind", noted):
        yield drafted


def drafting(setting: Setting, kind: str, name: str) -> Findings:
    """Each chain on engines under random arrivals and cancels, against plain decoding in one slot."""
    dtype = setting.pick(torch.bfloat16, torch.float32)
    one = lab(kind, dtype, str(setting.device))
    asked = demo_cases(one, name, setting.pick(8, 2))
    expected = play(one, Bench(), asked)
    benches = (
        {"n_slots": 4, "n_pages": 26, "captured": True, "overlaps": True},
        {
            "n_slots": 8,
            "n_pages": 512,
            "batch_size": 48,
            "page_size": 16,
            "adaptive": False,
            "by_value": False,
        },
    )
    for i, chain in enumerate(setting.pick((*CHAINS, chains(one.folders)[-1]), QUICK_CHAINS)):
        label = (
            f"{kind}, {name}, {chain[0] if len(chain) == 1 else f'{len(chain)} drafters'}, {str(dtype)[6:]}"
        )
        if setting.left_s() < 0:
            yield Finding(label, None, {"why": "no time left"})
            continue
        tally = disturbed(one, Bench(chain, **benches[i % 2]), asked, expected, i)
        told = {"tokens": tally.n_tokens, "accepted": tally.n_accepted, "requests that differ": tally.n_wrong}
        yield Finding(label, ok=tally.n_wrong == 0 and tally.n_tokens > 0, figures=told)


def as_on_the_cpu(setting: Setting, kind: str) -> Finding:
    """float64, three kinds of sampling: four slots on the device with drafters, one plain slot on the CPU."""
    host, there = (lab(kind, torch.float64, where) for where in ("cpu", str(setting.device)))
    n_tokens = n_wrong = 0
    for name in setting.pick(SAMPLINGS, ("greedy",)):
        asked = demo_cases(host, name, setting.pick(4, 1))
        expected = play(host, Bench(), asked).tokens
        found = play(there, Bench(("ngram-simple", "draft-model"), n_slots=4, n_pages=64), asked).tokens
        n_tokens += sum(map(len, expected.values()))
        n_wrong += sum(found.get(i) != tokens for i, tokens in expected.items())
    told = {"tokens": n_tokens, "requests that differ": n_wrong}
    return Finding(f"{kind}, as on the CPU, float64", ok=n_wrong == 0 and n_tokens > 0, figures=told)
