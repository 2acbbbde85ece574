"""What the parts of a benchmark are given: a loaded model, the device, and what the device can do at most."""

from __future__ import annotations

import functools
import itertools
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from tests.bench.stage import Stage, Task, demo_tasks, random_tasks
from tests.gpu.ceilings import matmul_rate, memory_rate
from tests.gpu.setting import Setting
from tests.oracle.lab import Lab

KINDS = ("rename", "continue", "docstring")
HISTORY = ("ngram-simple", "ngram-map-k", "ngram-map-k4v", "ngram-mod", "ngram-cache", "suffix")
N_ROUNDS = 7  # of sides that alternate
NO_OVERLAP = ", no overlap"  # behind the name of what is measured


@dataclass
class Scene:
    """A model on a device."""

    name: str
    lab: Lab
    setting: Setting
    rounds: int = N_ROUNDS
    peers: Mapping[str, str] = field(default_factory=dict)  # other servers: name -> address
    tasks: dict[str, list[Task]] = field(default_factory=dict)  # by kind, with the target's own replies

    @functools.cached_property
    def read_rate(self) -> float:
        """Bytes/s: of a plain read or a copy; on CPU of prepacked linears, which read alone."""
        if self.setting.on_gpu or self.setting.quick:
            return memory_rate(self.setting)
        from tests.bench.bars import bandwidth

        return bandwidth()

    @functools.cached_property
    def matmul_rate(self) -> float:
        """bfloat16 operations/s of a square product."""
        return matmul_rate(self.setting)

    @property
    def n_rounds(self) -> int:
        return int(self.setting.pick(self.rounds, 1))

    @property
    def networks(self) -> tuple[str, ...]:
        """The drafters that are networks: the draft model, then the heads."""
        return ("draft-model",) * (self.lab.draft is not None) + tuple(self.lab.folders.heads)

    @property
    def auto(self) -> tuple[str, ...]:
        """What a server with the same files would load by default."""
        return ("suffix", *self.networks[:1])

    @property
    def ways(self) -> Mapping[str, bool]:
        """Whether passes overlap (`Stage.overlaps`), by what a name ends with: both where servers do it, on a GPU."""
        both = self.setting.on_gpu or self.setting.quick
        return {"": True, NO_OVERLAP: False} if both else {"": False}

    @property
    def unread(self) -> Tensor | None:
        """The embedding, unless it is the head too: of it a pass reads a row per token."""
        target = self.lab.target
        return target.decoder.embedding.weight if target.config.tied is False else None

    @property
    def read_bytes(self) -> int:
        """Bytes of weights that a pass reads."""
        return int(self.lab.target.weight_bytes - (0 if self.unread is None else self.unread.nbytes))

    @property
    def n_multiplied(self) -> int:
        """Parameters that a token is multiplied with."""
        return int(self.lab.target.n_params - (0 if self.unread is None else self.unread.numel()))

    @property
    def kv_bytes(self) -> int:
        """Bytes of a token's keys and values."""
        return sum(need.token_bytes(self.lab.target.dtype) for need in self.lab.target.needs)

    def timely(self, sizes: Sequence[int]) -> Iterator[int]:
        """The sizes in turn, until the time is up."""
        return itertools.takewhile(lambda _: self.setting.left_s() > 0, sizes)

    def fitting(self, sizes: Sequence[int]) -> list[int]:
        """Those numbers of tokens that the lab's context has room for."""
        return [n for n in sizes if n + 64 <= self.lab.n_ctx]

    def answered(self, stage: Stage, kind: str) -> list[Task]:
        """Tasks of a kind with replies to recite, made once."""
        if kind not in self.tasks:
            most = self.setting.pick(64, 12)
            if kind == "random":
                vocab_size = min(4096, self.lab.target.vocab_size)  # inflated ids never occur
                self.tasks[kind] = random_tasks(vocab_size, self.n_rounds, self.setting.pick(32, 8))
            else:
                # Some replies are too short to count.
                asked = demo_tasks(self.lab, kind, 2 * self.n_rounds, most)
                types = tuple(one for one in self.auto if one in stage.bench.types)
                self.tasks[kind] = stage.answered(asked, types)[: self.n_rounds]
        return self.tasks[kind]


def alternating(sides: Sequence[str], n_rounds: int) -> Iterator[tuple[int, str]]:
    """(round, side): all sides once a round, every second round from the other end."""
    for i in range(n_rounds):
        yield from ((i, side) for side in (sides if i % 2 else reversed(sides)))


def middle(values: Sequence[float]) -> float:
    return statistics.median(values)
