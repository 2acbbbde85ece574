"""What is read next is fetched meanwhile: every line of a record, every part of a key, and none twice."""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
import pytest
from llvmlite import ir

from slipstream.kernels.attention import by_vectors
from slipstream.kernels.matmul import narrow, unpack
from slipstream.kernels.matmul.block_steps import add_chunk, columns_of
from slipstream.kernels.matmul.formats import CHUNK, LAYOUTS, PANEL
from slipstream.kernels.matmul.unpack import AHEAD
from slipstream.kernels.vector import WIDTH

LONG = ir.IntType(64)
OF_EIGHT = pytest.mark.skipif(unpack.MOST_ROWS < 8, reason="no tiles of eight rows here")


@pytest.mark.parametrize("n_rows", [1, 4, pytest.param(8, marks=OF_EIGHT)])
@pytest.mark.parametrize("kind", ["Q8_0", "Q4_K"])
def test_a_chunk_fetches_each_line_once(kind: str, n_rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    form, way, rows = LAYOUTS[kind], narrow.ways()[-1], n_rows
    records = np.zeros(2 * form.record_bytes + PANEL * n_rows * 64, np.uint8)
    counts = np.zeros(256, np.int64)
    begin = records.ctypes.data + AHEAD

    def count(builder: Any, address: Any) -> None:
        line = builder.udiv(builder.sub(address, LONG(begin)), LONG(64))
        place = builder.gep(LONG(counts.ctypes.data).inttoptr(LONG.as_pointer()), [line])
        builder.store(builder.add(builder.load(place), LONG(1)), place)

    monkeypatch.setattr(unpack, "emit_fetch_once", count)
    rest = np.zeros(1 << 14, np.float32)
    others, first_record = rest.ctypes.data, records.ctypes.data

    @numba.njit
    def multiply() -> None:
        for first in range(0, PANEL, columns_of(kind, rows, way) * WIDTH):
            add_chunk((others, others, first_record, 0, first, others, others), kind, rows, way)

    multiply()
    n_lines = -(-form.record_bytes * CHUNK // form.block // 64)
    assert counts[:n_lines].tolist() == [1] * n_lines
    assert counts.sum() <= n_lines + 3


@pytest.mark.parametrize(("d_head", "d_value"), [(128, 128), (256, 256), (64, 64), (192, 128), (80, 80)])
def test_values_bring_all_of_the_next_keys(d_head: int, d_value: int) -> None:
    keys_of, wide = by_vectors._keys_of.py_func, d_value - d_value % by_vectors.GATHERED
    parts = [keys_of("keys", d_head, column, wide) for column in range(0, wide, by_vectors.GATHERED)]
    assert [one for _, first, end in parts for one in range(first, end)] == list(range(d_head))
    assert keys_of(None, d_head, 0, wide) is None
