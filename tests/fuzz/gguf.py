"""GGUF files with fields changed, bits flipped and ends cut off: each loads or is refused, soon and in little memory.

    python -m tests.fuzz.gguf [--cases 10000] [--seed N]

A finding is an error that is none of ours, a message of several lines or without the file's name, a case over MOST_S,
or one that takes MOST_MIB more memory than there was before. Read are config, tensors, tokenizer and chat template.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import resource
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import torch

from slipstream import kernels
from slipstream.engine.checkpoint.weights import tensor_names
from slipstream.engine.errors import LoadError
from slipstream.engine.models.heads.head_choices import NO_CHOICE
from slipstream.engine.models.heads.mtp import load_mtp, mtp_tensors
from slipstream.engine.models.network import Network
from slipstream.engine.models.reading.documents import text_source
from slipstream.engine.models.registry import load_network
from slipstream.engine.speculate.registry import NETWORKS, kind_of
from slipstream.engine.text.chat import load_chat_template
from slipstream.engine.text.tokenizer import Tokenizer
from tests import head_checkpoints as heads
from tests.assistant_checkpoint import assistant_checkpoint
from tests.checkpoints import tiny_checkpoint
from tests.gguf_bytes import Place, places
from tests.gguf_files import gguf_of
from tests.oracle.window_heads import released_checkpoint

CPU = torch.device("cpu")
N_CTX = 64
MOST_S = 1.0
MOST_MIB = 64  # files have less than one
ROOM_MIB = 1024  # of addresses: more cannot be asked for
LONGEST = 2000  # characters of a message, the path left out
STATUS, PEAK = Path("/proc/self/status"), Path("/proc/self/clear_refs")
EXTREMES = (
    0,
    1,
    2,
    3,
    7,
    8,
    9,
    13,
    31,
    255,
    2**15,
    2**16,
    2**24,
    2**31 - 1,
    2**31,
    2**32 - 1,
    2**62,
    2**63,
    2**64 - 1,
)
NUMBERS = {
    "n_tensors",
    "n_keys",
    "n_dims",
    "dimension",
    "offset",
    "count",
    "type",
    "element type",
    "tensor type",
}
FAMILIES = (
    "llama",
    "gemma3",
    "gpt_oss",
    "glm4_moe",
    "deepseek_v3",
    "qwen3_next",
    "qwen3_5_moe",
    "kimi_linear",
    "gemma4",
)
WINDOWS = ("mimo", "step")  # families with layers of prediction in the same file
OWN_LAYERS = ("qwen3_", "kimi_", "gemma4")  # families whose configs list theirs


@dataclass(slots=True)
class Findings:
    """What a run has seen."""

    ends: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    slowest_s: float = 0.0
    largest_mib: float = 0.0


class Mutator:
    """An endless source of files, the same for the same seed."""

    def __init__(self, files: Sequence[bytes], seed: int) -> None:
        self._dice = random.Random(seed)
        self._files = [(data, _entries(places(data))) for data in files]

    def next(self) -> bytes:
        """A file of which one to four things have been changed."""
        data, entries = self._dice.choice(self._files)
        changed = bytearray(data)
        for _ in range(self._dice.choice((1, 1, 1, 2, 2, 4))):
            # Every key and tensor as often as any other, and of the vocabulary, which is long, seldom a text.
            known = self._dice.choice(entries)
            if self._dice.random() < 0.2:
                known = known + self._dice.choice(entries)
            if self._dice.random() < 0.7:
                known = [one for one in known if one.what in NUMBERS] or known
            self._dice.choice((self._flip, self._replace, self._replace, self._swap))(changed, known)
        if self._dice.random() < 0.15:
            self._cut(changed, self._dice.choice(entries))
        return bytes(changed)

    def _flip(self, data: bytearray, known: Sequence[Place]) -> None:
        """Bits of a field, or anywhere in the header."""
        one = self._dice.choice(known)
        for _ in range(self._dice.choice((1, 1, 2, 8))):
            is_inside = self._dice.random() < 0.7
            at = (
                one.start + self._dice.randrange(one.n_bytes)
                if is_inside
                else self._dice.randrange(len(data))
            )
            data[at] ^= 1 << self._dice.randrange(8)

    def _replace(self, data: bytearray, known: Sequence[Place]) -> None:
        """A field by an extreme number, or one near its own."""
        one = self._dice.choice(known)
        own = int.from_bytes(data[one.start : one.start + one.n_bytes], "little")
        number = self._dice.choice(
            (*EXTREMES, own + 1, own - 1, own * 2, own // 2, self._dice.getrandbits(64))
        )
        data[one.start : one.start + one.n_bytes] = (number % 256**one.n_bytes).to_bytes(
            one.n_bytes, "little"
        )

    def _swap(self, data: bytearray, known: Sequence[Place]) -> None:
        """Two fields of one size, or one over another."""
        one = self._dice.choice(known)
        other = self._dice.choice([each for each in known if each.n_bytes == one.n_bytes])
        here, there = (slice(each.start, each.start + each.n_bytes) for each in (one, other))
        if self._dice.random() < 0.5:
            data[here], data[there] = data[there], data[here]
        else:
            data[here] = data[there]

    def _cut(self, data: bytearray, known: Sequence[Place]) -> None:
        """The end, or something out of the middle."""
        at = self._dice.choice((self._dice.choice(known).start, self._dice.randrange(len(data))))
        if self._dice.random() < 0.5:
            del data[at:]
        else:
            del data[at : at + self._dice.choice((1, 4, 8, 32, 1000))]


def _entries(known: Sequence[Place]) -> list[list[Place]]:
    """The fields of the beginning, of each key and of each tensor, without those that are empty."""
    found: list[list[Place]] = [[]]
    for one in known:
        if one.what in ("key length", "name length"):
            found.append([])
        if one.n_bytes:
            found[-1].append(one)
    return found


class Seeds(NamedTuple):
    """What a run begins with."""

    files: list[bytes]  # valid ones, of models and of draft heads
    targets: Mapping[str, Network]  # that heads are for, by drafter; "": of the others


def seeds(folder: Path) -> Seeds:
    """Made in a folder. Selects ops for this machine."""
    for dtype in (torch.float32, torch.bfloat16):
        kernels.select(CPU, dtype)
    made = []
    shape = {
        "num_hidden_layers": 3,
        "hidden_size": 64,
        "intermediate_size": 32,
        "max_position_embeddings": 128,
    }
    for i, family in enumerate(FAMILIES):
        changes = {} if family.startswith(OWN_LAYERS) else shape
        model = tiny_checkpoint(family, folder / family, changes=changes)
        made.append(gguf_of(model).as_type(("Q8_0", "F32", "Q4_0", "BF16")[i % 4]))
    made += [gguf_of(released_checkpoint(one, folder / one)).as_type("Q8_0") for one in WINDOWS]
    target = folder / FAMILIES[0]
    shape = {"head_dim": heads.D_HEAD}
    eagle = {**heads.EAGLE3["SafeAILab"]["config"], "architectures": ["LlamaForCausalLMEagle3"], **shape}
    eagle |= {"eagle_aux_hidden_state_layer_ids": [1, 2, 3]}
    dspark = {**heads.DSPARK_CONFIG, **shape, "target_layer_ids": [0, 1]}
    for name, tensors, config in (
        ("eagle", heads.eagle3("midlayer", 8, n_draft_ids=100), eagle),
        ("dspark", heads.dspark(31, n_layers=1, n_taps=2, rank=12), dspark),
    ):
        made.append(gguf_of(heads.write(folder / name, tensors, config), target))
    assisted = folder / "gemma4"
    made.append(gguf_of(assistant_checkpoint(assisted, folder / "assistant"), assisted).as_type("Q8_0"))
    files = [one.write(folder / "seed.gguf").read_bytes() for one in made]
    of = {"": target, "draft-assistant": assisted}
    return Seeds(files, {name: load_network(one, torch.float32, CPU, N_CTX) for name, one in of.items()})


def steps(path: Path, targets: Mapping[str, Network]) -> Iterator[Callable[[], object]]:
    """All that a start does with a file, each of which may refuse it."""

    def model() -> None:
        network = load_network(path, torch.float32, CPU, N_CTX)
        if mtp_tensors(tensor_names(path), network.config.n_layers):
            load_mtp(path, network, N_CTX)

    def drafts() -> None:
        name = kind_of(path)
        load = NETWORKS[name].load
        if load is not None:
            load(path, targets.get(name, targets[""]), N_CTX, NO_CHOICE)

    def text() -> None:
        source = text_source(path)
        tokenizer = Tokenizer(source)
        load_chat_template(source, tokenizer)
        tokenizer.decode(tokenizer.encode("The quick brown fox, 漢字"))

    yield model
    yield drafts
    yield text


def end_of(step: Callable[[], object], path: Path) -> tuple[str, str | None]:
    """How a step ended, and what is wrong with that."""
    try:
        step()
    except LoadError as error:
        message = str(error)
        if not message.startswith(str(path)):
            return type(error).__name__, f"a message without the file: {message[:500]!r}"
        if not message.isprintable() or len(message) > LONGEST + len(path.name):
            return type(
                error
            ).__name__, f"a message of several lines or {len(message)} characters: {message[:500]!r}"
        return type(error).__name__, None
    except BaseException as error:  # panics of Rust are no Exception
        if isinstance(error, KeyboardInterrupt):
            raise
        frame = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{Path(frame.filename).name}:{frame.lineno}"
        return type(error).__name__, f"{type(error).__name__} at {where}: {error!s:.500}"
    return "loaded", None


def run(begin: Seeds, folder: Path, *, seed: int, n_cases: int) -> Findings:
    """Write mutants into a folder, one after another, and load them."""
    files, targets = begin
    findings, mutator, path = Findings(), Mutator(files, seed), folder / "mutant.gguf"
    for data in files:  # what the first call of a library takes is no mutant's
        path.write_bytes(data)
        ends = [end_of(step, path) for step in steps(path, targets)]
        assert ends[1:] == [("loaded", None)] * 2, ends
    with warnings.catch_warnings(), little_room():
        warnings.simplefilter("error")
        for number in range(n_cases):
            path.write_bytes(mutator.next())
            before = _peak_mib(reset=True)
            for step in steps(path, targets):
                started = time.perf_counter()
                end, wrong = end_of(step, path)
                took = time.perf_counter() - started
                findings.ends[end] += 1
                findings.slowest_s = max(findings.slowest_s, took)
                if wrong is not None:
                    findings.wrong.append(f"case {number}: {wrong}")
            grown = _peak_mib() - before
            findings.largest_mib = max(findings.largest_mib, grown)
            if grown > MOST_MIB:
                findings.wrong.append(f"case {number}: {grown:.0f} MiB for {path.stat().st_size} bytes")
    return findings


@contextlib.contextmanager
def little_room() -> Iterator[None]:
    """A process that cannot get much more memory than it has."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    if STATUS.exists():
        resource.setrlimit(resource.RLIMIT_AS, ((int(_status("VmSize")) + ROOM_MIB * 1024) * 1024, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def _peak_mib(*, reset: bool = False) -> float:
    """The most memory that this process had since the last reset; 0 where the system does not say."""
    if not PEAK.exists():
        return 0.0
    if reset:
        PEAK.write_text("5")
    return _status("VmHWM") / 1024


def _status(name: str) -> float:
    """A line of the process's status, in KiB."""
    lines = STATUS.read_text().splitlines()
    return next(float(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=None)
    options = parser.parse_args(arguments)
    seed = random.randrange(2**32) if options.seed is None else options.seed
    with tempfile.TemporaryDirectory() as folder:
        findings = run(seeds(Path(folder)), Path(folder), seed=seed, n_cases=options.cases)
    if findings.slowest_s > MOST_S:
        findings.wrong.append(f"{findings.slowest_s:.2f} s for one step")
    sys.stdout.writelines(f"{n:6} {end}\n" for end, n in findings.ends.most_common())
    sys.stdout.writelines(f"FOUND {one}\n" for one in findings.wrong[:20])
    sys.stdout.write(
        f"{options.cases} files (seed {seed}): slowest step {1e3 * findings.slowest_s:.0f} ms,"
        f" largest growth {findings.largest_mib:.1f} MiB, {len(findings.wrong)} findings\n"
    )
    return 1 if findings.wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
