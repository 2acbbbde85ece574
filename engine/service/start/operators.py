"""Which implementation of each operator runs, after it has proven itself on this machine.

A kernel that a new driver, compiler or processor runs wrongly must not serve: it would write wrong text, or text that
depends on what else is computed, from a server that looks healthy. So every implementation that is about to be chosen
is held against its definition first, in processes of its own (`kernels.proof`). The next one takes the place of one
that fails, which the log, /health and /props say. What was proven is kept: only the first start of a version waits.
"""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count

import torch

from slipstream.engine.errors import SettingError
from slipstream.engine.service.start.rounding import take_rounding
from slipstream.engine.service.start.sizes import Checkpoint
from slipstream.engine.settings import Settings
from slipstream.kernels import OPS, select, user_cache
from slipstream.kernels.dispatch import CannotRunError, Selected, candidates
from slipstream.kernels.matmul.quantized import rounds_inputs, widen
from slipstream.kernels.proof import proving
from slipstream.kernels.proof.kept_proofs import Kept, state_of
from slipstream.kernels.proof.proving import NotTriedError, Task, Tried

log = logging.getLogger(__name__)

PRODUCTS = ("matmul",)  # ops that layers of a narrower dtype may run in float32
# Of every network, of every pick, and of text on the device.
_ALWAYS = ("matmul", "norm", "choose", "verify", "ngram")
_LONGEST = ("attention", "gated_delta", "choose")  # to compile; these come first
_REFERENCE = "reference"  # the definition, which has nothing to prove


@dataclass(frozen=True, slots=True)
class Use:
    """The operators that networks need on one device in one dtype."""

    device: torch.device
    dtype: torch.dtype
    ops: frozenset[str]
    is_whole: bool  # a network runs in this dtype, not only some of its products
    weights: frozenset[str] = frozenset()  # types of matrices that a model has, to be proven besides

    @property
    def type_name(self) -> str:
        return str(self.dtype).removeprefix("torch.")

    def tasks(self, leaves_out: tuple[str, ...]) -> list[Task]:
        """What is to be proven: of each op the implementations before its definition."""
        found = []
        for op in OPS:
            names = candidates(op, self.device, self.dtype) if op in self.ops else ()
            if _REFERENCE in names:
                names = names[: names.index(_REFERENCE)]
            rounds = op in PRODUCTS and rounds_inputs() and self.dtype is torch.bfloat16
            if names:
                found.append(Task(str(self.device), self.type_name, op, names, leaves_out, rounds=rounds))
            if names and op in PRODUCTS:
                of_types = (replace(found[-1], leaves_out=(), weights=one) for one in sorted(self.weights))
                found += of_types
        return sorted(found, key=lambda task: task.op not in _LONGEST)


@dataclass(frozen=True, slots=True)
class Selection:
    """Which implementations run."""

    replaced: tuple[str, ...]  # a sentence for each op whose best implementation failed on this machine
    chosen: Mapping[str, Mapping[str, str]]  # by dtype on the target's device: op -> implementation
    widened: tuple[str, ...] = ()  # types of weights whose products failed


def select_operators(sources: Sequence[Checkpoint], settings: Settings) -> Selection:
    """Fix each op's implementation for every device and dtype in use, and say which.

    sources: the target first. Raises `SettingError` where exactness is asked for and an op fails, or has no
    implementation that promises it, or where inputs are to be rounded that no product reads.
    """
    take_rounding(sources, settings)
    # What the cache holds decides which code of attention runs.
    leaves_out = () if settings.kv_cache_dtype.startswith("fp8") else ("float8",)
    uses, replaced = _uses(sources), list[str]()
    # By device and dtype, (op, implementation) -> why it must not run.
    failed: defaultdict[tuple[str, str], dict[tuple[str, str], str]] = defaultdict(dict)
    wide: dict[str, str] = {}  # types that are widened -> why
    chosen: dict[str, Mapping[str, str]] = {}
    for device in dict.fromkeys(use.device for use in uses):
        tasks = [task for use in uses if use.device == device for task in use.tasks(leaves_out)]
        for tried in _prove(device, tasks):
            if tried.task.weights is None:
                failed[tried.task.device, tried.task.dtype] |= {
                    (tried.task.op, name): f"it failed its self-check ({why})" for name, why in tried.failed
                }
            elif tried.failed:
                wide[tried.task.weights] = _why_wide(tried)
    widen(wide)
    for use in uses:
        folders = OPS if use.is_whole else PRODUCTS
        exact, own = folders if settings.exact else (), failed[str(use.device), use.type_name]
        try:
            lines = select(use.device, use.dtype, exact=exact, failed=own)
        except CannotRunError as error:
            if not settings.exact:
                raise
            why = f"cannot be kept on {use.device} in {use.dtype}: {error}"
            raise SettingError("exact", settings.exact, why) from None
        replaced += _log(use, [line for line in lines if line.op in folders])
        if use.device == sources[0].device:
            chosen[use.type_name] = {line.op: line.implementation for line in lines}
    _check_promises(settings, replaced, [*wide.values()])
    return Selection((*dict.fromkeys(replaced), *wide.values()), chosen, tuple(wide))


def _check_promises(settings: Settings, replaced: Sequence[str], wide: Sequence[str]) -> None:
    """Raises `SettingError` where operators that failed leave what was asked for undone."""
    if replaced and settings.exact:
        raise SettingError("exact", settings.exact, f"an operator failed on this machine: {replaced[0]}")
    products = [*wide, *(one for one in replaced if one.startswith(f"{PRODUCTS[0]} "))]
    if products and settings.round_activations:
        why = f"products failed on this machine: {products[0]}"
        raise SettingError("round_activations", settings.round_activations, why)


def _why_wide(tried: Tried) -> str:
    """A sentence, logged too: other weights can be multiplied, and these as well when they are wide."""
    reasons = "; ".join(f"{name}: it failed its self-check ({why})" for name, why in tried.failed)
    sentence = f"{tried.task.op} widens {tried.task.weights} in {tried.task.dtype}, as of {reasons}"
    log.error("operator %s", sentence)
    return sentence


def _uses(sources: Sequence[Checkpoint]) -> list[Use]:
    """float32 is always among them: some layers, such as the routers of some experts, multiply in it."""
    found: dict[tuple[torch.device, torch.dtype], set[str]] = {}
    weights: dict[tuple[torch.device, torch.dtype], set[str]] = {}
    for one in sources:
        found.setdefault((one.device, one.dtype), set()).update(_ALWAYS, one.outline.ops)
        scheme = one.config.quantization
        weights.setdefault((one.device, one.dtype), set()).update(scheme.rare_types if scheme else ())
    wide = {(one.device, torch.float32): set(PRODUCTS) for one in sources}
    return [
        Use(
            device,
            dtype,
            frozenset(ops),
            is_whole=(device, dtype) in found,
            weights=frozenset(weights.get((device, dtype), ())),
        )
        for (device, dtype), ops in (wide | found).items()
    ]


def _prove(device: torch.device, tasks: Sequence[Task]) -> list[Tried]:
    """Try what has not been proven on this machine yet."""
    n_threads = torch.get_num_threads()
    kept = Kept(user_cache.folder("proofs"), state_of(device, n_threads))
    if not _unproven(tasks, kept):
        return []
    with kept.alone():
        waiting = _unproven(tasks, kept)  # by now perhaps none: another server may have proven them
        started, n_done = time.perf_counter(), count(1)

        def told(tried: Tried) -> None:
            task = tried.task
            ran = f"{task.says(tried.proven or _REFERENCE)} in {task.dtype}"
            log.info("operators proven %d of %d: %s", next(n_done), len(waiting), ran)

        try:
            found = proving.run(waiting, n_threads, done=told)
        except NotTriedError as error:
            log.warning("operators were not proven, as no process for it could be started: %s", error)
            return []
        kept.add([one.task.key(one.proven) for one in found if one.proven is not None])
    log.info("operators proven device=%s seconds=%.1f", device, time.perf_counter() - started)
    return found


def _unproven(tasks: Sequence[Task], kept: Kept) -> list[Task]:
    proven = kept.load()
    return [task for task in tasks if task.key(task.implementations[0]) not in proven]


def _log(use: Use, lines: Sequence[Selected]) -> list[str]:
    """Say what runs; returns a sentence for each op whose best implementation failed."""
    chosen = " ".join(f"{line.op}={line.implementation}" for line in lines)
    log.info("operators device=%s dtype=%s %s", use.device, use.type_name, chosen)
    replaced = []
    for line in lines:
        level = logging.INFO if "refused" in line.reason else logging.DEBUG
        log.log(level, "operator %s=%s: %s", line.op, line.implementation, line.reason)
        if line.failed and line.op in use.ops:
            replaced.append(
                f"{line.op} runs as {line.implementation} in {use.type_name}, not as {'; '.join(line.failed)}"
            )
            log.error("operator %s", replaced[-1])
    return replaced
