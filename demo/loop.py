"""The training loop that target, draft and heads share: schedule, checkpoint file, progress in CPU time."""

from __future__ import annotations

import json
import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn

from demo import optimizer
from demo.curriculum import Batch

Trained = TypeVar("Trained", bound=nn.Module)

MATRIX_RATE = 0.02
OTHER_RATE = 0.003
WARM_UP = 0.005
DECAY_FROM = 0.45
FINAL_RATE = 0.02
GRADIENT_NORM = 1.0
LOG_STEPS = 25
RECENT_STEPS = 200
CHECK_SECONDS = 300.0

log = logging.getLogger("demo.train")


@dataclass
class Clock:
    """How far the run is; time is the process's own CPU time, so a pause costs nothing."""

    budget: float
    spent: float = 0.0
    steps: int = 0
    tokens: int = 0

    def __post_init__(self) -> None:
        self.last = time.process_time()

    def tick(self, tokens: int) -> None:
        """Count one step."""
        now = time.process_time()
        self.spent += now - self.last
        self.last = now
        self.steps += 1
        self.tokens += tokens

    @property
    def progress(self) -> float:
        return self.spent / self.budget


def rate(progress: float) -> float:
    """Learning rate factor: a short warm-up, a plateau, then a line down."""
    if progress < WARM_UP:
        return max(0.05, progress / WARM_UP)
    if progress < DECAY_FROM:
        return 1.0
    return max(FINAL_RATE, 1.0 - (1.0 - FINAL_RATE) * (progress - DECAY_FROM) / (1.0 - DECAY_FROM))


@dataclass
class Task:
    """What a run trains: a loss over (network, tokens, weights), its batches and its periodic check."""

    loss: Callable[[Any, Tensor, Tensor], Tensor]
    batch: Callable[[float], Batch]
    check: Callable[[], str]


class Loop(Generic[Trained]):
    """A network in training and its checkpoint file, from which an interrupted run goes on."""

    def __init__(self, network: Trained, file: Path, minutes: float, device: str) -> None:
        self.network, self.file, self.device = network.to(device), file, device
        self.optimizers = optimizer.build(network, MATRIX_RATE, OTHER_RATE)
        self.clock = Clock(60 * minutes)
        self.recent: deque[float] = deque(maxlen=RECENT_STEPS)
        if file.exists():
            self._load()

    def run(self, task: Task) -> None:
        """Train until the budget is spent, checking and saving at intervals."""
        running, checked = 0.0, self.clock.spent
        while self.clock.progress < 1.0:
            value, size = self._step(task)
            running += value
            self.recent.append(value)
            if self.clock.steps % LOG_STEPS == 0:
                self._log(running / LOG_STEPS, size)
                running = 0.0
            if self.clock.spent - checked > CHECK_SECONDS:
                checked = self.clock.spent
                self._check(task)
        self._check(task)

    def summary(self) -> dict[str, object]:
        """What was spent, and the loss it came to."""
        return {
            "steps": self.clock.steps,
            "tokens": self.clock.tokens,
            "cpu_minutes": round(self.clock.spent / 60, 1),
            "loss": round(sum(self.recent) / max(1, len(self.recent)), 4),
        }

    def write_summary(self, folder: Path, **more: object) -> None:
        """Leave the summary, and what else there is to say, beside the exported weights."""
        (folder / "training.json").write_text(json.dumps({**self.summary(), **more}) + "\n")

    def _step(self, task: Task) -> tuple[float, int]:
        """One update; returns its loss and the length of its rows."""
        optimizer.set_rate(self.optimizers, rate(self.clock.progress))
        batch = task.batch(self.clock.progress)
        loss = task.loss(self.network, batch.tokens.to(self.device), batch.weights.to(self.device))
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(self.network.parameters(), GRADIENT_NORM)
        for held in self.optimizers:
            held.step()
            held.zero_grad(set_to_none=True)
        self.clock.tick(int((batch.weights > 0).sum()))
        return loss.item(), batch.tokens.shape[1] - 1

    def _check(self, task: Task) -> None:
        self._save()
        log.info("check: %s", task.check())

    def _log(self, loss: float, size: int) -> None:
        clock = self.clock
        log.info(
            "step %d, %.1f min, %.2f M tokens, %d tokens/s, length %d, loss %.3f",
            clock.steps,
            clock.spent / 60,
            clock.tokens / 1e6,
            clock.tokens / max(clock.spent, 1),
            size,
            loss,
        )

    def _save(self) -> None:
        state = {
            "network": self.network.state_dict(),
            "optimizers": [held.state_dict() for held in self.optimizers],
            "recent": list(self.recent),
            "clock": (self.clock.spent, self.clock.steps, self.clock.tokens),
        }
        partial = self.file.with_suffix(".partial")
        torch.save(state, partial)
        partial.replace(self.file)

    def _load(self) -> None:
        state = torch.load(self.file, map_location=self.device, weights_only=True)
        self.network.load_state_dict(state["network"])
        for held, saved in zip(self.optimizers, state["optimizers"], strict=True):
            held.load_state_dict(saved)
        self.recent.extend(state.get("recent", ()))
        self.clock.spent, self.clock.steps, self.clock.tokens = state["clock"]
        log.info("resumed at step %d", self.clock.steps)
