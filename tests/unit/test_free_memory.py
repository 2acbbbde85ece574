"""Free memory from made-up system files, and what sizes make of it."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from slipstream.engine.cache.kv import KV
from slipstream.engine.errors import SettingError
from slipstream.engine.ranks import ALONE, Ranks
from slipstream.engine.service.start import sizes
from slipstream.engine.service.start.free_memory import free_memory
from slipstream.engine.service.start.sizes import Demand, Memory, page_count, why_shorter
from slipstream.engine.settings import Settings

MIB = 2**20
MEMINFO = {"proc/meminfo": "MemTotal: 16384 kB\nMemFree: 100 kB\nMemAvailable: 8192 kB\nHugePages_Total: 0\n"}


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, 8 * MIB),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/memory.max": "max\n"}, 8 * MIB),
        (
            {
                "proc/self/cgroup": "0::/a/b\n",
                "sys/fs/cgroup/a/memory.max": str(5 * MIB),
                "sys/fs/cgroup/a/memory.current": str(3 * MIB),
                "sys/fs/cgroup/a/memory.stat": f"anon 7\ninactive_file {MIB}\n",
                "sys/fs/cgroup/a/b/memory.max": "max",
            },
            3 * MIB,
        ),
        (
            {
                "proc/self/cgroup": "4:cpu:/x\n3:cpu,memory:/not/seen/here\n0::/\n",
                "sys/fs/cgroup/memory/memory.limit_in_bytes": str(4 * MIB),
                "sys/fs/cgroup/memory/memory.usage_in_bytes": str(5 * MIB),
            },
            0,
        ),
    ],
    ids=["no groups", "no limit", "version 2, above", "version 1, in a container"],
)
def test_what_is_free(files: dict[str, str], expected: int, tmp_path: Path) -> None:
    for name, text in (MEMINFO | files).items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert free_memory(tmp_path) == expected


def test_a_cache_that_is_larger_than_what_is_free_is_refused_with_the_size_that_fits() -> None:
    demand = Demand([KV(2, 64)], torch.float32)
    with pytest.raises(SettingError, match=r"--cache-size 301: at most 300 MiB are free"):
        page_count(Settings(cache_size=301), 512, [demand], Memory(300.5 * MIB, 0.25))
    assert page_count(Settings(cache_size=300), 512, [demand], Memory(300.5 * MIB, 0.25)) > 1000


def test_a_context_that_does_not_fit_is_refused_with_the_one_that_does() -> None:
    demand, memory = Demand([KV(2, 64)], torch.float32), Memory(4 * MIB, 0.5)
    settings = Settings(ctx_size=8192)
    with pytest.raises(SettingError, match=r"--ctx-size (\d+) would fit") as refused:
        page_count(settings, 8192, [demand], memory)
    n_ctx = int(str(refused.value).split("--ctx-size ")[-1].split()[0])
    assert page_count(settings, n_ctx, [demand], memory)
    with pytest.raises(SettingError):
        page_count(settings, n_ctx + 1, [demand], memory)


def test_why_a_context_is_shorter() -> None:
    assert why_shorter(Settings(), 4096, [4096], 0) is None
    assert why_shorter(Settings(ctx_size=64), 64, [4096, 64], 0) == "--ctx-size 64"
    assert "--ctx-size takes them" in str(why_shorter(Settings(), 32768, [40000, 40000], 0))
    assert "3 MiB of free memory" in str(why_shorter(Settings(), 600, [4096, 2048], 3 * MIB))


@dataclass
class Layers:
    """What `make_cache` asks of a network."""

    device: torch.device
    needs: list[KV]
    ranks: Ranks = ALONE
    dtype: torch.dtype = torch.float32


def test_a_draft_network_is_budgeted_on_its_own_device(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    near, far = torch.device("cpu"), torch.device("cpu:0")  # stand for two devices
    free = {near: 64.0 * MIB, far: 2.0 * MIB}
    monkeypatch.setattr(Memory, "of", lambda device, n_ranks: Memory(free[device] / n_ranks, 0.5))
    monkeypatch.setattr(sizes, "Network", Layers)

    def n_pages() -> int:
        networks = {"target": Layers(near, [KV(2, 64)]), "draft-model": Layers(far, [KV(1, 64)])}
        return len(sizes.make_cache(Settings(parallel=2), networks, 1000).pool.pages)

    with caplog.at_level(logging.WARNING):
        assert 17 <= n_pages() < 32, "what the small device holds"
    assert "of the 2 slots 1 at a time" in caplog.text
    free[far] = 64.0 * MIB
    assert n_pages() == 2 * 2 * 17
