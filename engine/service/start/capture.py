"""Captures an engine's passes: on CUDA as graphs, before the first request; on the CPU each shape when it comes.

The CPU of a server whose ranks compute a pass together does without: what they say to each other is not recorded.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from functools import partial

import torch

from slipstream.engine.core.engine import Engine
from slipstream.engine.device_loss import raise_if_lost
from slipstream.engine.errors import LoadError
from slipstream.engine.frames import FrameSize, frame_sizes
from slipstream.engine.models.captured import (
    Capture,
    Capturing,
    always,
    cpu_capture,
    cuda_affords,
    cuda_capture,
)
from slipstream.engine.service.run.rank_processes import RankProcesses
from slipstream.engine.service.start.sizes import batch_size, pages_each
from slipstream.engine.settings import Settings

log = logging.getLogger(__name__)


def capture_passes(
    engine: Engine, settings: Settings, n_drafts: int, processes: RankProcesses | None
) -> None:
    """Capture the passes of all networks. n_drafts: of a slot at most. Where that fails, they run as they are.

    Raises `LoadError` if it fails where ranks capture together: the others may have got further, or wait for this one.
    """
    target = engine.target.network
    found = way(target.device, settings, n_drafts, are_divided=processes is not None)
    if found is None:
        return
    capture, sizes = found
    started = time.perf_counter()
    n_pages = pages_each(settings, engine.capacity.n_ctx)
    stream = torch.zeros(1, target.config.d_model, dtype=target.dtype, device=target.device)
    try:
        affords = partial(cuda_affords, target.device) if target.device.type == "cuda" else always
        engine.capture(Capturing(capture, sizes, n_pages, n_drafts, stream, affords))
    except Exception as error:
        if processes is not None:
            processes.close()
            raise LoadError(
                f"passes could not be captured on all ranks; --no-capture-passes does not try: {error}"
            ) from error
        raise_if_lost(error)
        log.exception(
            "passes could not be captured and run slower than they should; --no-capture-passes does not try"
        )
        return
    if sizes is not None:
        log.info("captured sizes=%d seconds=%.1f", len(sizes), time.perf_counter() - started)


def way(
    device: torch.device, settings: Settings, n_drafts: int, *, are_divided: bool
) -> tuple[Capture, Sequence[FrameSize] | None] | None:
    """How passes are captured on a device, and of which sizes before the first request; None: they are not."""
    if device.type == "cuda":
        rows = 0 if are_divided else batch_size(settings, device)  # what the other ranks afford is not known
        return cuda_capture(device), frame_sizes(settings.parallel, n_drafts, rows)
    return None if are_divided else (cpu_capture(), None)
