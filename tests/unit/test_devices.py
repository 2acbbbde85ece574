"""Which device a network runs on, and that a thread launches on it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.cuda._utils import _get_device_index

from slipstream.engine.batch import use_device
from slipstream.engine.errors import SettingError
from slipstream.engine.service.start import divided, launch
from slipstream.engine.settings import Settings

DEMO = Path(__file__).parents[2] / "demo"


@pytest.fixture(autouse=True)
def _two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)


def draft_on(name: str | None, target: str) -> torch.device:
    source: Any = SimpleNamespace(path=DEMO / "draft")
    target_from = launch._checkpoint(str(DEMO / "target"), target, "auto")
    return launch._draft_checkpoint(source, target_from, Settings(device_draft=name)).device


@pytest.mark.parametrize(
    ("name", "target", "device"),
    [
        (None, "cuda:1", "cuda:1"),
        ("cuda:1", "cuda:1", "cuda:1"),
        ("cuda", "cuda:0", "cuda:0"),
        (None, "cuda", "cuda:0"),
        ("cpu", "cuda:1", "cpu"),
    ],
)
def test_a_draft_model_runs_on_the_targets_gpu_or_the_cpu(name: str | None, target: str, device: str) -> None:
    assert str(draft_on(name, target)) == device


@pytest.mark.parametrize(("name", "target"), [("cuda:1", "cuda:0"), ("cuda", "cuda:1"), ("cuda:1", "cuda")])
def test_another_gpu_is_refused_under_the_flag_that_names_it(name: str, target: str) -> None:
    with pytest.raises(SettingError, match=f"^--device-draft {name}: another GPU than the target's"):
        draft_on(name, target)


@pytest.mark.parametrize(
    ("name", "reason"),
    [("foo", "is not cpu, cuda"), ("cuda:7", "this machine has 2"), ("meta", "is not cpu, cuda")],
)
def test_a_device_that_there_is_not_is_refused_under_its_own_flag(name: str, reason: str) -> None:
    with pytest.raises(SettingError, match=f"^--device-draft {name}: {reason}"):
        draft_on(name, "cpu")
    with pytest.raises(SettingError, match=f"^--device {name}: {reason}"):
        launch._checkpoint(str(DEMO / "target"), name, "auto")


@pytest.mark.parametrize("name", ["cuda", "auto"])
def test_a_gpu_has_its_number_wherever_devices_are_compared(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its tensors have it, and a draft model is captured and drafts ahead where its device is that of a tensor."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert launch._checkpoint(str(DEMO / "target"), name, "auto").device == torch.device("cuda", 0)


@pytest.mark.parametrize(("name", "is_refused"), [("cuda", False), ("auto", False), ("cuda:1", True)])
def test_a_divided_model_takes_the_first_gpus(
    name: str, is_refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which have numbers too, but none that was asked for."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    settings = Settings(model=str(DEMO / "target"), device=name, tensor_parallel_size=2)
    target = launch._target_checkpoint(settings)
    if is_refused:
        with pytest.raises(SettingError, match=f"takes the first 2 GPUs; leave out --device {name}"):
            divided.check(settings, target, None)
    else:
        divided.check(settings, target, None)


def test_a_thread_launches_on_its_networks_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[int] = []
    # As torch does it, which takes no GPU without its number.
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: used.append(_get_device_index(device)))
    for name in ("cuda:1", "cpu", "cuda"):
        use_device(torch.device(name))
    assert used == [1, 0]
