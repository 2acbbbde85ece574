"""How long work takes on a device: CUDA events around a graph's replays, so that Python's launches do not count."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

N_WARM = 3
LEAST_S, MOST_CALLS = 0.02, 400  # what one measurement runs for
SLOW_S = 0.2  # a call that takes longer is measured once


@dataclass(frozen=True, slots=True)
class Took:
    """Seconds of one call."""

    seconds: float  # the median of rounds
    in_graph: bool  # without launches; False: with them, because the work could not be captured
    why: str = ""  # it could not

    @property
    def us(self) -> float:
        return 1e6 * self.seconds


def measure(works: Sequence[Callable[[], object]], device: torch.device, *, graph: bool = True) -> Took:
    """Seconds of one of the works, which are called in turn so that their weights do not stay in a cache."""
    for one in works[:N_WARM]:
        one()
    if device.type != "cuda":
        return Took(_host_seconds(works), in_graph=False)
    torch.cuda.synchronize(device)
    started = time.perf_counter()
    works[0]()
    torch.cuda.synchronize(device)
    if (once := time.perf_counter() - started) > SLOW_S:
        return Took(once, in_graph=False, why="it takes too long to be measured again")
    why = ""
    if graph:
        try:
            return Took(_graph_seconds(works, device), in_graph=True)
        except RuntimeError as error:
            if "captur" not in str(error).lower():
                raise
            why = str(error).splitlines()[0][:120]
            torch.cuda.synchronize(device)
    return Took(_event_seconds(lambda: [one() for one in works], len(works)), in_graph=False, why=why)


def _graph_seconds(works: Sequence[Callable[[], object]], device: torch.device) -> float:
    side = torch.cuda.Stream(device)
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):
        for one in works:
            one()
    torch.cuda.current_stream(device).wait_stream(side)
    captured = torch.cuda.CUDAGraph()
    n_turns = -(-16 // len(works))  # a short graph's own launch would count
    with torch.cuda.graph(captured):
        for _ in range(n_turns):
            for one in works:
                one()
    return _event_seconds(captured.replay, n_turns * len(works))


def _event_seconds(run: Callable[[], object], n_calls: int) -> float:
    """Median over rounds of run's time on the device, per call."""
    run()
    first = _one_round(run, 1)
    n_runs = max(1, min(MOST_CALLS, int(LEAST_S / 5 / max(first, 1e-7))))
    return statistics.median(_one_round(run, n_runs) for _ in range(5)) / n_calls


def _one_round(run: Callable[[], object], n: int) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(n):
        run()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3 / n


def _host_seconds(works: Sequence[Callable[[], object]]) -> float:
    times = []
    for one in works[:5]:
        started = time.perf_counter()
        one()
        times.append(time.perf_counter() - started)
    return statistics.median(times)
