"""What is read next is fetched meanwhile: every line of a record, every part of a key, and none twice."""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
import pytest
from llvmlite import ir

from slipstream.kernels.attention import by_vectors
from slipstream.kernels.matmul import unpack
from slipstream.kernels.matmul.block_steps import WAYS, add_chunk, columns_of
from slipstream.kernels.matmul.code_bytes import HAS_VNNI
from slipstream.kernels.matmul.formats import CHUNK, LAYOUTS, OF_BYTES, OF_FLOATS, PANEL
from slipstream.kernels.vector import IS_WIDE, WIDTH

LONG = ir.IntType(64)
OF_EIGHT = pytest.mark.skipif(unpack.MOST_ROWS < 8, reason="no tiles of eight rows here")


@pytest.mark.parametrize("n_rows", [1, 4, pytest.param(8, marks=OF_EIGHT)])
@pytest.mark.parametrize("kind", ["Q8_0", "Q4_K"])
def test_a_chunk_fetches_each_line_once(kind: str, n_rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    counts = fetched(kind, n_rows, OF_FLOATS, monkeypatch)
    n_lines = -(-LAYOUTS[kind].record_bytes * CHUNK // LAYOUTS[kind].block // 64)
    assert counts[:n_lines].tolist() == [1] * n_lines
    assert counts.sum() <= n_lines + 3


@pytest.mark.skipif(not (IS_WIDE and HAS_VNNI), reason="this CPU has no bytes in wide vectors")
@pytest.mark.parametrize(("amd", "n_rows", "n_fetched"), [(True, 1, 0), (True, 4, 34), (False, 1, 34)])
def test_a_lone_row_of_bytes_is_left_to_amds_cpus(
    amd: bool, n_rows: int, n_fetched: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unpack, "is_amd", lambda: amd)
    assert fetched("Q8_0", n_rows, OF_BYTES, monkeypatch).sum() == n_fetched


def fetched(kind: str, n_rows: int, way: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """How often each line behind a chunk is fetched, [256]."""
    form, rows = LAYOUTS[kind], n_rows
    records = np.zeros(2 * form.record_bytes + PANEL * n_rows * 64, np.uint8)
    counts = np.zeros(256, np.int64)
    begin = records.ctypes.data + WAYS[way](LAYOUTS[kind], n_rows).ahead

    def count(builder: Any, address: Any) -> None:
        line = builder.udiv(builder.sub(address, LONG(begin)), LONG(64))
        place = builder.gep(LONG(counts.ctypes.data).inttoptr(LONG.as_pointer()), [line])
        builder.store(builder.add(builder.load(place), LONG(1)), place)

    monkeypatch.setattr(unpack, "emit_fetch_once", count)
    rest = np.zeros(1 << 14, np.float32)
    others, first_record = rest.ctypes.data, records.ctypes.data

    @numba.njit
    def multiply() -> None:
        for first in range(0, PANEL, columns_of((kind, rows, way)) * WIDTH):
            add_chunk((others, others, first_record, 0, first, others, others), (kind, rows, way))

    multiply()
    return counts


@pytest.mark.parametrize(("d_head", "d_value"), [(128, 128), (256, 256), (64, 64), (192, 128), (80, 80)])
def test_values_bring_all_of_the_next_keys(d_head: int, d_value: int) -> None:
    keys_of, wide = by_vectors._keys_of.py_func, d_value - d_value % by_vectors.GATHERED
    parts = [keys_of("keys", d_head, column, wide) for column in range(0, wide, by_vectors.GATHERED)]
    assert [one for _, first, end in parts for one in range(first, end)] == list(range(d_head))
    assert keys_of(None, d_head, 0, wide) is None
