"""Other servers as peers, with our own for one: an endpoint is an endpoint."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from slipstream.engine.api import Request
from slipstream.engine.errors import InvalidRequest
from tests.bench import peers, transformers_side
from tests.bench.peers import OURS, server
from tests.bench.scene import Scene
from tests.bench.stage import Task
from tests.gpu.setting import Setting
from tests.http.fake import FakeEngine, Step, words
from tests.http.serving import Served, served
from tests.oracle.lab import DEMO, Lab

TASK = Task(
    "rename", (1, 2), max_tokens=10, messages=({"role": "user", "content": "hello"},), text="hello there"
)


def slow(request: Request) -> Iterator[Step]:
    """Ten words in four chunks, with a wait before each."""
    return words(request, delay_s=0.02)


@pytest.fixture(scope="module")
def one() -> Iterator[Served]:
    with served(FakeEngine(script=slow)) as running:
        yield running


@pytest.mark.parametrize("path", ["", "/", "/v1", "/v1/completions"])
def test_a_rate_is_of_the_servers_own_count_between_first_and_last_chunk(
    one: Served, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ticks: list[int] = []

    def clock() -> int:
        ticks.append(len(ticks))
        return ticks[-1]

    one.engine.requests.clear()
    monkeypatch.setattr(peers, "time", SimpleNamespace(perf_counter=clock))
    rate = server(one.url + path)(TASK)
    # The clock is read at chunks with text alone, of which there are four unless this process dawdles.
    assert 2 <= len(ticks) <= 4
    assert rate == 9 / (len(ticks) - 1)
    (asked,) = one.engine.requests
    assert asked.max_tokens == 10
    assert asked.sampling.temperature == 0
    assert asked.sampling.ignore_eos
    if path.endswith("completions"):
        assert asked.prompt == "hello there"
    else:
        assert [message["content"] for message in asked.prompt.messages] == ["hello"]  # type: ignore[union-attr]


def test_a_reply_that_is_too_short_is_no_measurement(one: Served) -> None:
    short = Task("rename", (1,), max_tokens=20, messages=TASK.messages)
    with pytest.raises(ValueError, match="10 tokens instead of 20"):
        server(one.url)(short)


def test_a_refusal_is_told(one: Served) -> None:
    one.engine.refusal = InvalidRequest("max_tokens", "is not liked today")
    try:
        with pytest.raises(ValueError, match=r"status 400.*not liked today"):
            server(one.url)(TASK)
    finally:
        one.engine.refusal = None


def scene(**servers: str) -> Scene:
    return Scene("demo", Lab(DEMO, torch.float32), Setting(torch.device("cpu"), True, 1e18), peers=servers)


def test_a_peer_that_is_not_there_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        peers, "ours", lambda _: {OURS: lambda task: 10.0, "Slipstream, faster": lambda task: 25.0}
    )
    monkeypatch.setattr(peers, "theirs", lambda _: {})
    found = {one.name: one.figures for one in peers.peers(scene(gone="http://127.0.0.1:9"))}
    assert found["rename, Slipstream, faster"]["x our plain"] == 2.5
    assert found["gone"]["why"].startswith("ConnectError")
    assert "\n" not in found["gone"]["why"]
    assert len(found) == 5  # two sides of ours by two tasks, and the line


def test_transformers_may_not_stop_short() -> None:
    def generate(prompt: torch.Tensor, *, streamer: Any, **_: Any) -> None:
        for n in (prompt.numel(), *told):
            streamer.put(torch.zeros(n))

    told = [1, 2]
    model = SimpleNamespace(generate=generate, device="cpu", generation_config=SimpleNamespace())
    with pytest.raises(ValueError, match="3 tokens instead of 6"):
        transformers_side.generated(model, Task("rename", (5, 6), max_tokens=6))
    assert transformers_side.generated(model, Task("rename", (5, 6), max_tokens=3)) > 0
    told[:] = [3]
    with pytest.raises(ValueError, match="all 3 tokens came at once"):
        transformers_side.generated(model, Task("rename", (5, 6), max_tokens=3))


def test_a_model_without_files_is_built_for_transformers_too(tmp_path: Path) -> None:
    from tests.bench.models import load

    lab = load("small", tmp_path, torch.float32, torch.device("cpu"), 256)
    one = Scene("small", lab, Setting(torch.device("cpu"), True, 1e18))
    model: Any = transformers_side.loaded_by_transformers(one, "target")
    with torch.inference_mode():
        logits = model(torch.tensor([[5, 6, 7]])).logits[0, -1]  # [vocab]
    small: Any = transformers_side.loaded_by_transformers(scene(), "target")
    with torch.inference_mode():
        meant = small(torch.tensor([[5, 6, 7]])).logits[0, -1]
    torch.testing.assert_close(logits[: len(meant)], meant, atol=1e-3, rtol=1e-3)
    assert not list(tmp_path.iterdir())
