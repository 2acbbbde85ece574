"""A workload: requests whose texts, and whose drafters' luck, are scripted. Read from a TOML file (README.md).

A request's text is a function of (seed, request). Where each drafter is right is scripted per position of the text and
not per call, so all planners meet the same luck at the same places, however long their drafts are.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from slipstream.engine.speculate.drafter import NO_GUESS, Guess

FOLDER = Path(__file__).parent / "workloads"
TEXT, NETWORK = "copies", "network"  # the drafters of all workloads
ROOM = 64  # tokens of the script beyond a reply's end: guesses may go on there

Floats = NDArray[np.float64]

# A drafter's estimate of a token by the true probability of its being right.
ESTIMATES = ("none", "calibrated", "overconfident", "underconfident", "random")


@dataclass(frozen=True, slots=True, kw_only=True)
class Luck:
    """How right a drafter is while a text is in a state."""

    right: float = 0.0  # probability of a token, if those before it are right
    found: float = 1.0  # probability that it has a guess at all
    longest: int = ROOM  # tokens of a guess
    decay: float = 1.0  # of `right`, with each token deeper in a guess
    spread: float = 0.0  # standard deviation of `right` between tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """A stretch of text of geometric length, with a mean of `length` tokens."""

    length: float
    text: Luck
    network: Luck


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """Requests of one kind. `prompt` and `reply`: (least, most) tokens."""

    weight: float
    prompt: tuple[int, int]
    reply: tuple[int, int]
    states: Sequence[State]


@dataclass(frozen=True, slots=True)
class Told:
    """What a drafter says of a request's text, by position of the reply."""

    longest: list[int]  # tokens of a guess that begins there; 0: none
    right: list[int]  # how many of them are right
    wrong: list[int]  # what it says after that
    survival: list[float]  # its estimates; empty: it has none
    truth: list[int]

    def guess(self, at: int, n: int) -> Guess:
        """At most n tokens that follow the first `at` tokens of the reply."""
        n = min(n, self.longest[at])
        if n <= 0:
            return NO_GUESS
        n_right = min(n, self.right[at])
        token_ids = self.truth[at : at + n_right] + self.wrong[at + n_right : at + n]
        return Guess(token_ids, self.survival[at : at + n])


@dataclass(frozen=True, slots=True)
class Script:
    """A request: its prompt's length, its reply, and what drafters say of it."""

    n_prompt: int
    n_reply: int
    truth: list[int]  # [n_reply + ROOM]
    told: Mapping[str, Told]


class Workload:
    """Requests without end."""

    def __init__(self, table: Mapping[str, Any], name: str) -> None:
        """table: a workload's file; raises `TypeError` for a key that is unknown."""
        if extra := set(table) - {"about", "estimates", "in_a_row", "request"}:
            raise TypeError(f"workload {name}: unknown keys {sorted(extra)}")
        self.name, self.about = name, table.get("about", "")
        self.estimates = {TEXT: "none", NETWORK: "none"} | {
            {"text": TEXT, "network": NETWORK}[one]: how for one, how in table.get("estimates", {}).items()
        }
        if unknown := set(self.estimates.values()) - set(ESTIMATES):
            raise TypeError(f"workload {name}: unknown estimates {sorted(unknown)}")
        self.kinds = [_kind(one) for one in table["request"]]
        self._in_a_row: int = table.get("in_a_row", 1)
        weights = np.array([one.weight for one in self.kinds])
        self._shares = weights / weights.sum()
        self._scripts: dict[tuple[int, int], Script] = {}

    def script(self, seed: int, number: int) -> Script:
        """The request of a number, counted from 0."""
        key = (seed, number)
        if key not in self._scripts:
            # The first draw of a row's first request says of which kind all of them are.
            row = np.random.default_rng([seed, number // self._in_a_row * self._in_a_row])
            kind = self.kinds[int(row.choice(len(self.kinds), p=self._shares))]
            random = np.random.default_rng([seed, number])
            random.random()
            self._scripts[key] = self._written(kind, random)
        return self._scripts[key]

    def _written(self, kind: Kind, random: np.random.Generator) -> Script:
        n_prompt = int(random.integers(kind.prompt[0], kind.prompt[1] + 1))
        n_reply = int(random.integers(kind.reply[0], kind.reply[1] + 1))
        truth = random.integers(0, 2**27, n_reply + ROOM) * 4  # the tokens between them are wrong
        states = _states(kind.states, len(truth), random)
        told = {
            name: _told([getattr(one, field) for one in kind.states], states, truth + wrong, random)
            for wrong, (name, field) in enumerate(((TEXT, "text"), (NETWORK, "network")), 1)
        }
        ids = truth.tolist()
        made = {name: self._made(name, one, ids, random) for name, one in told.items()}
        return Script(n_prompt, n_reply, ids, made)

    def _made(self, name: str, one: _Luck, truth: list[int], random: np.random.Generator) -> Told:
        survival = _estimates(self.estimates[name], one.chance, random)
        return Told(one.longest, one.right, one.wrong, survival, truth)


@dataclass(frozen=True, slots=True)
class _Luck:
    longest: list[int]
    right: list[int]
    wrong: list[int]
    chance: Floats  # [n] true probabilities


def _kind(table: Mapping[str, Any]) -> Kind:
    states = [
        State(
            length=one.get("length", 1e9),
            text=Luck(**one.get("text", {"found": 0.0})),
            network=Luck(**one.get("network", {})),
        )
        for one in table["state"]
    ]
    prompt, reply = (tuple(table[one]) for one in ("prompt", "reply"))
    return Kind(weight=table.get("weight", 1.0), prompt=prompt, reply=reply, states=states)


def _states(states: Sequence[State], n: int, random: np.random.Generator) -> NDArray[np.int64]:
    """[n] the state of each token. The first is drawn by the states' lengths; each is followed by another."""
    if len(states) == 1:
        return np.zeros(n, np.int64)
    lengths = np.minimum([one.length for one in states], 1e6)
    found = np.empty(n, np.int64)
    at, now = 0, int(random.choice(len(states), p=lengths / lengths.sum()))
    while at < n:
        length = int(random.geometric(1.0 / lengths[now]))
        found[at : at + length] = now
        at += length
        now = (now + 1 + int(random.integers(len(states) - 1))) % len(states)
    return found


def _told(
    lucks: Sequence[Luck], states: NDArray[np.int64], wrong: NDArray[np.int64], random: np.random.Generator
) -> _Luck:
    n = len(states)
    mean = np.clip([one.right for one in lucks], 1e-6, 1.0 - 1e-6)[states]
    spread = np.array([one.spread for one in lucks])[states]
    # A beta distribution of this mean and standard deviation.
    weight = np.maximum(mean * (1.0 - mean) / np.maximum(spread, 1e-3) ** 2 - 1.0, 0.05)
    chance = np.where(spread > 0.0, random.beta(mean * weight, (1.0 - mean) * weight), mean)
    drawn, found = random.random(n), random.random(n)
    longest = np.where(
        found < np.array([one.found for one in lucks])[states],
        np.array([one.longest for one in lucks])[states],
        0,
    )
    decay = np.array([one.decay for one in lucks])[states]
    return _Luck(longest.tolist(), _runs(drawn, chance, decay), wrong.tolist(), chance)


def _runs(drawn: Floats, chance: Floats, decay: Floats) -> list[int]:
    """How many tokens of a guess are right, by the position where it begins. All [n]."""
    n = len(drawn)
    padded = np.concatenate((drawn, np.ones(ROOM))), np.concatenate((chance, np.zeros(ROOM)))
    going, found, factor = np.ones(n, bool), np.zeros(n, np.int64), np.ones(n)
    for depth in range(ROOM):
        going &= padded[0][depth : depth + n] < padded[1][depth : depth + n] * factor
        if not going.any():
            break
        found += going
        factor = factor * decay
    runs: list[int] = found.tolist()
    return runs


def _estimates(how: str, chance: Floats, random: np.random.Generator) -> list[float]:
    """[n], or empty: what the drafter itself believes of each token."""
    said = {
        "none": np.empty(0),
        "calibrated": chance,
        "overconfident": 1.0 - (1.0 - chance) / 5.0,
        "underconfident": 0.6 * chance,
        "random": random.random(len(chance)),
    }[how]
    estimates: list[float] = said.tolist()
    return estimates


def read_workload(path: Path) -> Workload:
    """The workload of a file, named after it."""
    return Workload(tomllib.loads(path.read_text(encoding="utf-8")), path.stem)


def all_workloads() -> dict[str, Path]:
    """The files of this folder's workloads by name."""
    return {path.stem: path for path in sorted(FOLDER.glob("*.toml"))}
