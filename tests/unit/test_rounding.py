"""`--round-activations`: it takes effect on every rank and in every proof, or the server does not start."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from slipstream.engine.checkpoint.byte_layouts import Fp8
from slipstream.engine.checkpoint.layouts import Awq, Blocks, Group, Scheme
from slipstream.engine.errors import SettingError
from slipstream.engine.models.registry import read_model
from slipstream.engine.service.start import operators, rank
from slipstream.engine.service.start.operators import select_operators
from slipstream.engine.service.start.rounding import take_rounding
from slipstream.engine.service.start.sizes import Checkpoint
from slipstream.engine.settings import Settings
from slipstream.kernels import select
from slipstream.kernels.matmul import narrow, panels
from slipstream.kernels.matmul import proof as products
from slipstream.kernels.matmul.blocks import BlockWeight
from slipstream.kernels.matmul.formats import FORMATS, OF_A8
from slipstream.kernels.matmul.narrow import NarrowWeight
from slipstream.kernels.matmul.quantized import round_inputs, rounds_inputs, widen
from slipstream.kernels.proof import proving
from slipstream.kernels.proof.inputs import Inputs
from slipstream.kernels.proof.judge import problem
from tests.block_data import block_bytes
from tests.gguf_files import gguf_of

DEMO = Path(__file__).parents[2] / "demo"
CPU, NARROW = torch.device("cpu"), torch.bfloat16
ROUNDING = Settings(round_activations=True)
SCHEMES = {
    "gguf": Scheme(method="gguf", by_name={"a": Blocks("IQ2_S"), "b": Blocks("Q4_K")}),
    "awq": Scheme(method="awq", groups=[Group(Awq(128))]),
    "fp8": Scheme(method="fp8", groups=[Group(Fp8((128, 128)))]),
    "no records": Scheme(method="gguf", by_name={"a": Blocks("IQ2_S")}),
    "plain": None,
}


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    for dtype in (torch.float32, NARROW):
        select(CPU, dtype)
    yield
    round_inputs(False)
    widen(())


def source(scheme: str, dtype: torch.dtype = NARROW, device: str = "cpu") -> Checkpoint:
    config = replace(read_model(DEMO / "target"), quantization=SCHEMES[scheme])
    return Checkpoint(DEMO / "target", config, torch.device(device), dtype)


@pytest.mark.parametrize(
    ("made", "reason"),
    [
        (("gguf", NARROW, "cuda"), "only products on the CPU round, and the model runs on cuda"),
        (("gguf", torch.float32), "the model runs in float32, not in bfloat16"),
        (("plain",), "its weights are no whole numbers of few bits"),
        (("fp8",), "its weights are no whole numbers of few bits"),
        (("no records",), "its weights are no whole numbers of few bits"),
    ],
)
def test_a_setting_that_would_change_nothing_is_refused(made: tuple[str, ...], reason: str) -> None:
    one = source(*made)  # type: ignore[arg-type]
    with pytest.raises(SettingError, match=f"^--round-activations True: it would change nothing: {reason}$"):
        take_rounding([one], ROUNDING)
    take_rounding([one, source("gguf")], ROUNDING)  # a draft model rounds
    assert rounds_inputs()
    take_rounding([one], Settings())
    assert not rounds_inputs()


def test_a_cpu_that_widens_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(narrow, "refusal", lambda: "this CPU has no avx2")
    with pytest.raises(SettingError, match=r"weights of few bits are widened: this CPU has no avx2$"):
        take_rounding([source("awq")], ROUNDING)


def test_weights_are_packed_for_rounded_inputs_while_it_is_on() -> None:
    """Those packed before keep their products."""
    weight = BlockWeight(block_bytes("Q4_K", 64, 512), "Q4_K", None, NARROW)
    before = panels.pack(weight)
    round_inputs(True)
    after = panels.pack(weight)
    assert isinstance(before, NarrowWeight)
    assert isinstance(after, NarrowWeight)
    assert before.way != OF_A8 == after.way
    wide = panels.pack(replace(weight, dtype=torch.float32))
    assert isinstance(wide, NarrowWeight)
    assert wide.way != OF_A8
    x = torch.randn(5, 512, generator=torch.Generator().manual_seed(1)).to(NARROW)
    exact, rounded = panels.linear(x, before, torch.float32), panels.linear(x, after, torch.float32)
    assert 1e-3 < float((rounded - exact).norm() / exact.norm()) < 1e-2


@pytest.mark.sampled(keep=2)
@pytest.mark.parametrize("weights", ["int8", *FORMATS])
def test_products_prove_themselves_with_inputs_that_rounding_leaves(weights: str) -> None:
    round_inputs(True)
    assert problem("matmul", "panels", CPU, NARROW, weights=weights) is None


def test_the_proofs_of_every_start_hold_with_it() -> None:
    round_inputs(True)
    assert problem("matmul", "panels", CPU, NARROW) is None


def test_inputs_of_the_proof_are_their_own_rounding() -> None:
    round_inputs(True)
    x = products._steps(Inputs(CPU, NARROW), 3, 64).float().view(3, 2, 32)
    steps = x.abs().amax(2, keepdim=True) / 127
    assert torch.equal(x, (x / steps).round() * steps)


def test_proofs_with_rounded_inputs_are_others() -> None:
    """Only those of bfloat16, and of operators that multiply: the others' are the same, and need not run again."""

    def keys() -> set[str]:
        uses = operators._uses([source("gguf"), source("gguf", torch.float32)])
        return {task.key(task.implementations[0]) for use in uses for task in use.tasks(())}

    plain = keys()
    round_inputs(True)
    assert keys() - plain == {
        "cpu bfloat16 matmul.panels with rounded inputs",
        "cpu bfloat16 matmul.panels of Q4_K with rounded inputs",
    }


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("weights", "sentence"),
    [("Q5_0", "matmul widens Q5_0 in bfloat16"), (None, "matmul runs as [a-z]+ in bfloat16, not as panels")],
)
def test_products_that_fail_with_rounded_inputs_end_the_start(
    weights: str | None, sentence: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The fault is in a process, as in tests of other proofs; the server would run without rounding unasked."""
    monkeypatch.setattr(operators.user_cache, "folder", lambda name: tmp_path / name)
    gguf_of(DEMO / "draft").as_type("Q5_0").write(tmp_path / "model.gguf")
    file = Checkpoint(tmp_path / "model.gguf", read_model(tmp_path / "model.gguf"), CPU, NARROW)
    faulty = partial(proving.run, child=("tests.unit.proof_child", "scales_blocks_wrongly"))
    monkeypatch.setattr(
        operators.proving,
        "run",
        lambda tasks, n, done: faulty([one for one in tasks if one.rounds and one.weights == weights], n),
    )
    with pytest.raises(SettingError, match=f"^--round-activations True: products failed .*: {sentence}"):
        select_operators([file], ROUNDING)


def test_other_ranks_round_as_the_first_does() -> None:
    order = {"n_threads": torch.get_num_threads(), "device": "cpu", "rank": 1, "chosen": {}, "widened": ()}
    rank._select(order | {"round_activations": True})
    assert rounds_inputs()
    rank._select(order | {"round_activations": False})
    assert not rounds_inputs()
