"""Operators prove themselves: what is right passes, and what is wrong is found, in a process that may be lost."""

from __future__ import annotations

import importlib
import json
import logging
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from slipstream import kernels
from slipstream.engine.checkpoint.layouts import packed_bytes
from slipstream.engine.errors import SettingError
from slipstream.engine.models.registry import read_model
from slipstream.engine.service.start import operators, rank
from slipstream.engine.service.start.operators import select_operators
from slipstream.engine.service.start.sizes import Checkpoint
from slipstream.engine.settings import Settings
from slipstream.kernels import dispatch, user_cache
from slipstream.kernels.gated import cpu as gated
from slipstream.kernels.matmul.blocks import BlockWeight
from slipstream.kernels.matmul.formats import FORMATS
from slipstream.kernels.matmul.quantized import is_proven, widen
from slipstream.kernels.matmul.scaled import kind_of
from slipstream.kernels.proof import proving
from slipstream.kernels.proof.judge import problem
from slipstream.kernels.proof.kept_proofs import Kept, state_of
from slipstream.kernels.proof.proving import NotTriedError, Task, Tried
from tests.block_data import block_bytes
from tests.gguf_files import gguf_of
from tests.unit import proof_child

CPU, NARROW = torch.device("cpu"), torch.bfloat16
DEMO = Path(__file__).parents[2] / "demo"
GATED = Task("cpu", "bfloat16", "gated", ("cpu",))
NORM = Task("cpu", "bfloat16", "norm", ("cpu",))
# What each planted fault is found by.
FOUND = {
    "raises": "ValueError: a fault that was put in",
    "has_no_memory": "OutOfMemoryError",
    "loses_the_device": "the device was lost: CUDA error: an illegal memory access",
    "gives_nan": "off by inf",
    "is_imprecise": "off by 0.0",
    "has_other_bits_at_width_3": "other bits in 3 rows from row 0",
    "ends_the_process": "the process that tried it ended",
    "does_not_compile": "gated.cu: does not compile",
}


@pytest.fixture(autouse=True)
def _selected() -> Iterator[None]:
    for dtype in (torch.float32, NARROW):
        kernels.select(CPU, dtype)
    yield
    widen(())


@pytest.mark.sampled(keep=8)
@pytest.mark.parametrize("dtype", [torch.float32, NARROW], ids=str)
@pytest.mark.parametrize("folder", kernels.OPS)
def test_what_runs_here_proves_itself(folder: str, dtype: torch.dtype) -> None:
    names = [name for name in dispatch.candidates(folder, CPU, dtype) if name != "reference"]
    assert all(problem(folder, name, CPU, dtype) is None for name in names)
    assert names or folder in ("verify", "ngram")


@pytest.mark.sampled(keep=2)
@pytest.mark.parametrize("weights", ["int8", *FORMATS])
def test_products_prove_themselves_on_weights_of_every_type(weights: str) -> None:
    name = dispatch.candidates("matmul", CPU, NARROW)[0]
    assert problem("matmul", name, CPU, NARROW, weights=weights) is None


def test_weights_of_a_type_that_are_multiplied_wrongly_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    name = dispatch.candidates("matmul", CPU, NARROW)[0]
    module = importlib.import_module(f"slipstream.kernels.matmul.{name}")
    right = module.linear
    monkeypatch.setattr(
        module, "linear", lambda x, packed, out_dtype=None: 1.02 * right(x, packed, out_dtype)
    )
    found = problem("matmul", name, CPU, NARROW, weights="Q4_K")
    assert found is not None
    assert found.startswith("Q4_K: result 0 is off by 0.0")


def test_types_of_a_models_weights_are_proven_with_its_products(tmp_path: Path) -> None:
    gguf_of(DEMO / "draft").as_type("Q5_0").write(tmp_path / "model.gguf")
    path = DEMO / "target"
    sources = [Checkpoint(one, read_model(one), CPU, NARROW) for one in (path, tmp_path / "model.gguf")]
    tasks = {use.dtype: use.tasks(("float8",)) for use in operators._uses(sources)}
    keys = {
        dtype: [task.key("panels") for task in own if task.op == "matmul"] for dtype, own in tasks.items()
    }
    assert keys == {
        NARROW: ["cpu bfloat16 matmul.panels float8", "cpu bfloat16 matmul.panels of Q5_0"],
        torch.float32: ["cpu float32 matmul.panels float8"],
    }


def test_every_operator_has_cases() -> None:
    for folder in kernels.OPS:
        assert importlib.import_module(f"slipstream.kernels.{folder}.proof").CASES


@pytest.mark.parametrize(
    "fault", [one for one in FOUND if one not in ("ends_the_process", "does_not_compile")]
)
def test_a_planted_fault_is_found(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gated, "gated_mul", proof_child.FAULTS[fault])
    if fault == "loses_the_device":
        with pytest.raises(torch.AcceleratorError):
            problem("gated", "cpu", CPU, NARROW)
        return
    found = problem("gated", "cpu", CPU, NARROW)
    assert found is not None
    assert found.split(": ", 1)[-1].startswith("result 0") or FOUND[fault] in found
    assert FOUND[fault] in found


def test_a_state_that_is_folded_wrongly_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A parked row too many becomes part of the state: outputs are right, until it is looked at."""
    from slipstream.kernels.gated_delta import cpu as delta

    right = delta.gated_delta

    def folds_all(mixed: Any, decay: Any, beta: Any, gate: Any, state: Any, spans: Any) -> Any:
        counts = spans.span_starts.diff() + spans.history_starts.diff()
        return right(mixed, decay, beta, gate, state, replace(spans, n_settled=counts.int()))

    monkeypatch.setattr(delta, "gated_delta", folds_all)
    found = problem("gated_delta", "cpu", CPU, torch.float32)
    assert found is not None
    assert "parked and folded" in found


def ask(fault: str, *tasks: Task, patience_s: float = 300.0) -> dict[str, Tried]:
    child = ("tests.unit.proof_child", fault)
    return {one.task.op: one for one in proving.run(tasks, 1, child=child, patience_s=patience_s)}


@pytest.mark.sampled(keep=2, together=True)
@pytest.mark.parametrize("fault", ["loses_the_device", "ends_the_process", "does_not_compile"])
def test_a_process_that_is_lost_costs_one_implementation(fault: str) -> None:
    found = ask(fault, GATED, NORM)
    assert found["norm"] == Tried(NORM, "cpu")
    assert found["gated"].proven is None
    ((name, why),) = found["gated"].failed
    assert name == "cpu"
    assert FOUND[fault] in why


@pytest.mark.sampled(keep=2, together=True)
def test_one_that_never_ends_is_given_up_and_the_next_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proving.os, "cpu_count", lambda: 1)  # both tasks go to one worker
    # Whatever follows is no less right for being tried by the next process.
    task = replace(GATED, implementations=("cpu", "reference"))
    found = ask("hangs", task, patience_s=4.0)["gated"]
    assert found.failed[0] == ("cpu", "it did not end within 4 s")
    assert found.proven == "reference" or len(found.failed) == 2  # a machine so slow that 4 s are too few


def test_where_no_process_starts_nothing_is_called_wrong() -> None:
    with pytest.raises(NotTriedError, match="No module named"):
        proving.run([GATED], 1, child=("tests.unit.no_such_module",))


@pytest.mark.sampled(keep=2, together=True)
def test_a_worker_that_cannot_start_leaves_the_rest_to_the_others(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    started = proving._Worker._started
    n_refused = []

    def refuses_one(worker: Any) -> Any:
        if not n_refused:
            n_refused.append(True)
            raise NotTriedError("no memory")
        return started(worker)

    monkeypatch.setattr(proving._Worker, "_started", refuses_one)
    monkeypatch.setattr(proving.os, "cpu_count", lambda: 2)
    found = proving.run([GATED, NORM], 1)
    assert sorted(one.proven or "" for one in found) == ["", "cpu"]
    assert not any(one.failed for one in found)
    assert "was not proven" in caplog.text


def test_proofs_are_kept_for_one_state_only(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(user_cache, "unkept", {})
    folder = tmp_path / "not there yet"
    kept, other = Kept(folder, "a state"), Kept(folder, "another")
    with kept.alone():
        kept.add(["one"])
    with kept.alone():
        kept.add(["two"])
    assert (kept.load(), other.load()) == ({"one", "two"}, set())
    (file,) = folder.glob("*.json")
    for damage in ('["one", ', "7", ""):
        file.write_text(damage)
        assert kept.load() == set()
    assert "cannot be read" in caplog.text
    Kept(None, "a state").add(["one"])
    assert Kept(None, "a state").load() == set()
    blocked = Kept(file, "a state")  # its folder is a file
    with blocked.alone():
        blocked.add(["one"])
    assert "proofs of operators" in user_cache.unkept


def test_the_state_is_that_of_sources_and_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    assert state_of(CPU, 1) == state_of(CPU, 1) != state_of(CPU, 2)
    assert torch.__version__ in state_of(CPU, 1)


@pytest.fixture
def proofs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An empty folder of proofs. Compiled kernels stay where they are: the processes would compile all of them anew."""
    monkeypatch.setattr(operators.user_cache, "folder", lambda name: tmp_path / name)
    return tmp_path / "proofs"


@pytest.fixture
def demo(proofs: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[str, ...]]:
    """`select_operators` for the demo, with a fault in the processes."""
    path = DEMO / "target"
    source = Checkpoint(path, read_model(path), CPU, NARROW)

    def select(fault: str | None, **settings: Any) -> tuple[str, ...]:
        child = (proving._CHILD,) if fault is None else ("tests.unit.proof_child", fault)
        monkeypatch.setattr(operators.proving, "run", partial(run_proofs, child=child))
        return select_operators([source], Settings(**settings)).replaced

    return select


run_proofs = proving.run


@pytest.mark.sampled(keep=2, together=True)
def test_a_server_goes_on_without_what_failed_and_says_so(
    demo: Callable[..., tuple[str, ...]], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    (sentence,) = demo("gives_nan")
    assert sentence.startswith("gated runs as reference in bfloat16, not as cpu: it failed its self-check (")
    assert f"operator {sentence}" in caplog.text
    assert dispatch._ops()["gated"][0]._table["cpu", NARROW].__module__.endswith("gated.reference")
    with pytest.raises(SettingError, match=r"^--exact True: .*gated"):
        demo("gives_nan", exact=True)
    # A failure is not kept: with the fault mended, all is well, and that is kept.
    assert demo(None) == ()
    caplog.clear()
    assert demo("raises") == ()
    assert "operators proven" not in caplog.text


@pytest.mark.sampled(keep=2, together=True)
@pytest.mark.usefixtures("proofs")
def test_weights_whose_products_failed_are_widened_and_others_are_not(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """int4 and fp8 are among the cases of every start, so a fault of all narrow weights replaces the implementation."""
    gguf_of(DEMO / "draft").as_type("Q5_0").write(tmp_path / "model.gguf")
    source = Checkpoint(tmp_path / "model.gguf", read_model(tmp_path / "model.gguf"), CPU, NARROW)
    of_blocks = partial(run_proofs, child=("tests.unit.proof_child", "scales_blocks_wrongly"))
    monkeypatch.setattr(
        operators.proving, "run", lambda tasks, n, done: of_blocks([one for one in tasks if one.weights], n)
    )
    (sentence,) = select_operators([source], Settings(exact=True)).replaced
    assert sentence.startswith(
        "matmul widens Q5_0 in bfloat16, as of panels: it failed its self-check (Q5_0: "
    )
    assert sentence in caplog.text
    weight = BlockWeight(block_bytes("Q5_0", 64, 64), "Q5_0", None, NARROW)
    assert (kind_of(weight), kind_of(replace(weight, data=block_bytes("Q8_0", 64, 64), kind="Q8_0"))) == (
        None,
        "Q8_0",
    )
    assert packed_bytes(weight, CPU) == packed_bytes(weight, torch.device("cuda")) == 2 * 64 * 64
    widen(())
    assert kind_of(weight) == "Q5_0"


def test_other_ranks_widen_what_the_first_does() -> None:
    order = {"n_threads": torch.get_num_threads(), "device": "cpu", "rank": 1, "chosen": {}}
    rank._select(order | {"widened": ("Q5_0",), "round_activations": False})
    assert (is_proven("Q5_0"), is_proven("Q8_0")) == (False, True)


def test_where_proofs_cannot_run_the_server_starts_and_warns(
    demo: Callable[..., tuple[str, ...]], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    assert demo(None) == ()
    assert "not proven" in caplog.text


@pytest.mark.sampled(keep=2, together=True)
def test_only_what_a_network_calls_is_proven(
    demo: Callable[..., tuple[str, ...]], proofs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(proving.os, "cpu_count", lambda: 1)  # a process is a second of imports
    demo(None)
    (file,) = proofs.glob("*.json")
    ops = {one.split()[2].partition(".")[0] for one in json.loads(file.read_text())}
    assert ops == {"matmul", "norm", "norm_rope_write", "attention", "gated", "choose"}
