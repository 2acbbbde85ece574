"""Products in AMX's tiles, emulated in memory so that every CPU proves them, and what is asked before them."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from slipstream.kernels import compiled, cpu_features
from slipstream.kernels.amx import HAS_TILES
from slipstream.kernels.cpu_features import TILES, features, is_amd
from slipstream.kernels.matmul import code_bytes, panels
from slipstream.kernels.matmul.tile_sums import TILE_ROWS
from tests import emulator
from tests.oracle.packed_products import group_sums, inputs, tiled_sums
from tests.process import ROOT

ABOUT = ("kernels/*.py", "kernels/attention/*.py")

BLOCKS = "tests/oracle/test_kernels_blocks.py::test_a_product_is_what_its_definition_says"
SCALED = "tests/oracle/test_kernels_scaled.py::test_a_product_is_what_its_definition_says"
PRODUCTS = [
    # Two groups in 32 inputs, each scaled; numbers of eight bits; blocks whose groups a tile adds up; plain weights.
    f"{BLOCKS}[one-thread-Q6_K-bfloat16-bytes]",
    f"{BLOCKS}[one-thread-Q8_0-bfloat16-bytes]",
    f"{SCALED}[fp8 by rows-tiles-1]",
    # Inputs of eight bits: one group and two, and codes of eight bits.
    *(f"{BLOCKS}[one-thread-{kind}-bfloat16-a8]" for kind in ("Q4_K", "Q6_K", "Q8_0")),
    "tests/oracle/test_tiles.py::test_plain_weights_add_even_and_odd_inputs_apart",
]
ATTENTION = [
    "tests/oracle/test_kernels.py::test_attention[64-21-3-64-cpu-bfloat16]",
    "tests/oracle/test_kernels.py::test_a_nan_reaches_the_rows_that_see_it_and_no_other[64-64-3-4-bfloat16]",
    "tests/oracle/test_kernels.py::test_attention_in_a_window[(64, 3, 1, 64)-63-cpu-bfloat16]",
    "tests/oracle/test_kernels.py::test_attention_to_scores_that_rise[64-64-cpu-bfloat16]",
    "tests/oracle/test_kernels_wholes.py::test_a_nan_of_an_image_reaches_no_row_outside[3-torch.bfloat16-cpu]",
    "tests/oracle/test_kernels_width.py::test_attention[one-thread-sinks-64-(6, 2, 64, 64, 64)-bfloat16]",
]


@pytest.mark.skipif(HAS_TILES, reason="the same test runs in this CPU's own tiles")
@pytest.mark.sampled(keep=0, together=True)
@pytest.mark.parametrize(
    "test",
    [*PRODUCTS, *ATTENTION],
    ids=lambda test: test.removeprefix("tests/oracle/test_").replace("::", " "),
)
def test_emulated_tiles_give_what_operators_are_defined_as(test: str) -> None:
    if test in PRODUCTS and not code_bytes.HAS_VNNI:
        pytest.skip("fewer rows are left to VNNI, which this CPU has not")
    # Kept for each state of the kernels' sources, of which the emulator is not a part.
    digest = hashlib.sha256(Path(emulator.__file__).with_name("amx.py").read_bytes()).hexdigest()[:16]
    environ = {name: value for name, value in os.environ.items() if name != "NUMBA_CACHE_DIR"}
    environ |= {"XDG_CACHE_HOME": str(emulator.kept() / f"tiles-{digest}"), "OMP_NUM_THREADS": "1"}
    program = [sys.executable, "-m", "pytest", "-rs", "--whole", "-p", "tests.emulator.amx", test]
    made = subprocess.run(program, cwd=ROOT, env=environ, capture_output=True, text=True, check=False)
    assert made.returncode == 0, made.stdout[-3000:] + made.stderr[-1000:]
    assert "SKIPPED" not in made.stdout


@pytest.mark.skipif(not HAS_TILES, reason="this CPU has no tiles")
def test_plain_weights_add_even_and_odd_inputs_apart() -> None:
    """32 inputs at a time, and those behind them two at a time, whatever rows are beside."""
    n_out, n_in = 16, 70
    weight = torch.randn(n_out, n_in, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    x, packed = inputs(2 * TILE_ROWS + 5, n_in, torch.bfloat16), panels.pack(weight)
    found = panels.linear(x, packed, torch.float32)  # [37, 16]
    for n in (1, TILE_ROWS, TILE_ROWS + 1, 2 * TILE_ROWS):
        assert torch.equal(panels.linear(x[-n:], packed, torch.float32), found[-n:]), n
    for row in (0, TILE_ROWS, 2 * TILE_ROWS + 4):
        total, wide, turned = torch.zeros(n_out), x[row].float(), weight.t().float().contiguous()  # [70, 16]
        for begin in (0, 32):
            part = turned[begin:].data_ptr()
            tiled_sums(wide[begin:].data_ptr(), part, total.data_ptr(), 32)
        rest, pairs = x[row, 64:].clone(), weight[:, 64:].unflatten(1, (-1, 2)).transpose(0, 1).contiguous()
        group_sums(rest.data_ptr(), pairs.data_ptr(), total.data_ptr(), n_in - 64, True)
        assert torch.equal(found[row], total), row


def test_tiles_are_used_where_linux_grants_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_features.config, "CPU_FEATURES", "+avx2,+amx-tile,+amx-bf16,+amx-int8")
    asked = features.__wrapped__
    monkeypatch.setattr(cpu_features, "_tiles_are_granted", lambda: True)
    assert asked() == {"avx2", *TILES}
    monkeypatch.setattr(cpu_features, "_tiles_are_granted", lambda: False)
    assert asked() == {"avx2"}
    monkeypatch.setattr(cpu_features, "_tiles_are_granted", lambda: True)
    monkeypatch.setattr(cpu_features.config, "CPU_FEATURES", "+avx2,+amx-tile,+amx-bf16")
    assert asked() == {"avx2"}  # tiles of bytes would be an illegal instruction


def test_code_with_tiles_is_not_kept_for_a_process_that_may_not_use_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(compiled, "features", lambda: TILES)
    granted = compiled._sources()
    monkeypatch.setattr(compiled, "features", frozenset)
    assert compiled._sources() != granted
    assert compiled.SOURCES in (granted, compiled._sources())


@pytest.mark.parametrize(
    ("name", "expected"), [("znver5", True), ("emeraldrapids", False), ("haswell", False)]
)
def test_whose_cpu_it_is(name: str, expected: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_features.config, "CPU_NAME", name)
    assert is_amd() is expected


FETCHES = """
from slipstream.kernels.compiled import fetch_once, kernel

@kernel
def fetch(address: int) -> None:
    fetch_once(address)

fetch(0)
print(next(iter(fetch.dispatcher.inspect_asm().values())))
"""


@pytest.mark.sampled(keep=0, together=True)
@pytest.mark.parametrize(("name", "expected"), [("znver4", "prefetchnta"), ("icelake-server", "prefetcht2")])
def test_what_is_read_once_goes_past_the_caches_of_amd_alone(
    name: str, expected: str, tmp_path: Path
) -> None:
    environ = {
        **os.environ,
        "NUMBA_CPU_NAME": name,
        "NUMBA_CPU_FEATURES": "+avx2",
        "NUMBA_CACHE_DIR": str(tmp_path),
    }
    program = [sys.executable, "-c", FETCHES]
    made = subprocess.run(program, cwd=ROOT, env=environ, check=True, capture_output=True, text=True).stdout
    assert {one for one in ("prefetchnta", "prefetcht2", "prefetcht1", "prefetcht0") if one in made} == {
        expected
    }
