"""A target that is divided over processes (`--tensor-parallel-size`): what it cannot be used with, and its start."""

from __future__ import annotations

import logging

import torch

from slipstream.engine.errors import LoadError, RankLost, SettingError
from slipstream.engine.service.run.rank_processes import RankProcesses
from slipstream.engine.service.start.draft_network import DraftSource
from slipstream.engine.service.start.operators import Selection
from slipstream.engine.service.start.sizes import Checkpoint, batch_size
from slipstream.engine.service.start.sums import Sums
from slipstream.engine.settings import Settings

log = logging.getLogger(__name__)


def check(settings: Settings, target: Checkpoint, source: DraftSource | None) -> None:
    """Raises `SettingError` for what cannot be divided, before anything is loaded. Sets the share of threads."""
    n = target.n_ranks
    if n == 1:
        return

    def refuse(why: str) -> SettingError:
        return SettingError("tensor_parallel_size", n, why)

    target.outline  # noqa: B018 - heads and features that do not come out even
    if target.device.type == "cuda" and ":" in settings.device:
        raise refuse(f"takes the first {n} GPUs; leave out --device {settings.device}")
    if target.device.type == "cuda" and torch.cuda.device_count() < n:
        raise refuse(f"this machine has {torch.cuda.device_count()} CUDA devices")
    if source is not None and source.kind.reads_cache:
        raise refuse(f"{source.name} reads the model's keys and values, of which each process has a part")
    if target.device.type == "cpu":
        torch.set_num_threads(max(1, torch.get_num_threads() // n))


def start(
    settings: Settings, target: Checkpoint, n_ctx: int, n_vocab: int, selection: Selection
) -> RankProcesses:
    """The other ranks, which load their parts while this process loads its own. Raises `LoadError`."""
    order = {
        "path": str(target.path),
        "device": target.device.type,
        "dtype": str(target.dtype).removeprefix("torch."),
        "kv_cache_dtype": settings.kv_cache_dtype,
        "n_ctx": n_ctx,
        "n_vocab": n_vocab,
        "n_rows": batch_size(settings, target.device),
        "d_model": target.config.d_model,
        "n_threads": torch.get_num_threads(),
        "chosen": {dtype: dict(ops) for dtype, ops in selection.chosen.items()},
        "widened": selection.widened,
        "round_activations": settings.round_activations,
    }
    return RankProcesses(target.n_ranks, target.device, order)


def prove_sums(settings: Settings, target: Checkpoint, processes: RankProcesses) -> str | None:
    """What is wrong with sums over the ranks, which prove them before they load; None if nothing is.

    Raises `SettingError` if something is and exactness is asked for, `LoadError` if a rank ends.
    """
    sums = Sums(batch_size(settings, target.device), target.config.d_model, target.dtype, target.device)
    try:
        wrong = sums.problem(processes.ranks)
    except RankLost as error:
        processes.close()
        raise LoadError(str(error)) from error
    if wrong is None:
        return None
    if settings.exact:
        processes.close()
        raise SettingError("exact", settings.exact, f"sums over the ranks failed on this machine: {wrong}")
    log.error("sums over ranks: %s", wrong)
    return wrong
