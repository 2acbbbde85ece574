"""The thread that looks at images: who waits for what, what is kept, what fails alone, how it ends."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from slipstream.engine.api import Image
from slipstream.engine.errors import DeviceLost, EngineStopped, StepFailed
from slipstream.engine.images import ImageFeatures, ImageLayout
from slipstream.server.vision.kept_features import KeptFeatures
from slipstream.server.vision.modest_thread import NICE, be_modest
from slipstream.server.vision.watching import Watching


class Eye:
    """Sees two rows in every image; waits while it is `shut`, and fails where its first pixel is 13."""

    marker = written = "<image>"
    placeholder = 7

    def __init__(self) -> None:
        self.parts = SimpleNamespace(device=torch.device("cpu"))
        self.open = threading.Event()
        self.open.set()
        self.looked: list[int] = []
        self.fault: Exception = ValueError("unlucky")

    def layout(self, width: int, height: int) -> ImageLayout:
        return ImageLayout((7, 7), np.ones(2, bool), None, 2)

    def look(self, image: Image) -> ImageFeatures:
        self.looked.append(image.pixels[0])
        assert self.open.wait(60)
        if image.pixels[0] == 13:
            raise self.fault
        n_rows = 3 if image.pixels[0] == 14 else 2
        return ImageFeatures(torch.full((n_rows, 4), torch.inf if image.pixels[0] == 15 else 1.0))


ROWS_BYTES = 2 * 4 * 4


def until(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.001)


def image(value: int) -> Image:
    return Image(1, 1, bytes([value, 0, 0]))


@pytest.fixture
def eye() -> Eye:
    return Eye()


@pytest.fixture
def vision(eye: Eye) -> Iterator[Watching]:
    watching = watch(eye)
    yield watching
    eye.open.set()
    watching.close()


def watch(eye: Any, n_kept: int = 2) -> Watching:
    return Watching(eye, n_kept * ROWS_BYTES)


def test_equal_images_are_looked_at_once(eye: Eye, vision: Watching) -> None:
    eye.open.clear()
    futures = [vision.features(image(value)) for value in (1, 2, 1, 2, 1)]
    eye.open.set()
    seen = [future.result(60) for future in futures]
    assert eye.looked == [1, 2]
    assert seen[0] is seen[2] is seen[4]
    assert seen[0] is not seen[1]


def test_the_least_recently_shown_goes_first(eye: Eye, vision: Watching) -> None:
    for value in (1, 2, 1, 3, 1, 2):
        vision.features(image(value)).result(60)
    assert eye.looked == [1, 2, 3, 2]
    assert vision.kept.n_bytes == 2 * ROWS_BYTES


def test_nothing_is_kept_beyond_its_bound() -> None:
    kept = KeptFeatures(10 * 16)
    sizes = [3, 11, 5, 1, 8, 2, 10, 4]  # in rows of 16 bytes
    for i, n_rows in enumerate(sizes):
        kept.keep(bytes([i]), ImageFeatures(torch.ones(n_rows, 4)))
        assert kept.n_bytes <= 10 * 16
        held = [kept.get(bytes([j])) for j in range(len(sizes))]
        assert kept.n_bytes == sum(one.n_bytes for one in held if one is not None)
    assert kept.get(b"\1") is None
    assert len(kept) == 1
    kept.keep(b"\7", ImageFeatures(torch.ones(4, 4)))
    assert (len(kept), kept.n_bytes) == (1, 4 * 16)


def test_deep_features_count_too() -> None:
    features = ImageFeatures(torch.ones(2, 4), torch.ones(3, 2, 4))
    kept = KeptFeatures(features.n_bytes - 1)
    kept.keep(b"", features)
    assert len(kept) == 0


@pytest.mark.parametrize(
    ("value", "why"), [(13, "unlucky"), (14, "3 rows where the layout has 2"), (15, "not finite")]
)
def test_an_image_fails_alone(eye: Eye, vision: Watching, value: int, why: str) -> None:
    eye.open.clear()
    futures = [vision.features(image(one)) for one in (1, value, 2, value)]
    eye.open.set()
    for future in (futures[1], futures[3]):
        with pytest.raises(StepFailed) as failed:
            future.result(60)
        assert why not in str(failed.value), "for the log alone"
        assert why in str(failed.value.__cause__)
    assert futures[0].result(60).rows.shape == futures[2].result(60).rows.shape == (2, 4)
    assert eye.looked == [1, value, 2]
    with pytest.raises(StepFailed):
        vision.features(image(value)).result(60)
    assert eye.looked == [1, value, 2, value], "a failure is not kept"


def test_what_nobody_waits_for_any_more_is_passed_over(eye: Eye, vision: Watching) -> None:
    eye.open.clear()
    first = vision.features(image(1))
    until(lambda: eye.looked == [1])
    given_up = vision.features(image(2))
    one, other = vision.features(image(3)), vision.features(image(3))
    assert given_up.cancel()
    assert one.cancel()
    assert first.cancel()
    eye.open.set()
    assert other.result(60).rows.shape == (2, 4)
    assert eye.looked == [1, 3]


def test_a_lost_device_ends_all(eye: Eye, vision: Watching) -> None:
    eye.fault = DeviceLost()
    eye.open.clear()
    futures = [vision.features(image(value)) for value in (13, 1, 2)]
    eye.open.set()
    for future in futures:
        with pytest.raises(DeviceLost):
            future.result(60)
    with pytest.raises(DeviceLost):
        vision.features(image(3)).result(60)
    assert eye.looked == [13]


def test_closing_fails_what_waits_and_ends_the_thread(eye: Eye, vision: Watching) -> None:
    vision.features(image(9)).result(60)
    eye.open.clear()
    futures = [vision.features(image(value)) for value in (1, 2)]
    until(lambda: eye.looked == [9, 1])
    closing = threading.Thread(target=vision.close)
    closing.start()
    for future in futures:
        with pytest.raises(EngineStopped):
            future.result(60)
    eye.open.set()
    closing.join(60)
    assert not closing.is_alive()
    assert not vision._thread.is_alive()
    with pytest.raises(EngineStopped):
        vision.features(image(9)).result(60)
    assert eye.looked == [9, 1]
    vision.close()


def test_a_modest_thread_leaves_other_threads_alone() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        told: list[int] = []

        def run() -> None:
            be_modest()
            told.append(torch.get_num_threads())
            if sys.platform == "linux":
                told.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))

        for target in (run, lambda: told.append(torch.get_num_threads())):
            thread = threading.Thread(target=target)
            thread.start()
            thread.join(60)
        own = [NICE] if sys.platform == "linux" else []
        assert told == [1, *own, 3]
        assert torch.get_num_threads() == 3
        assert sys.platform != "linux" or os.getpriority(os.PRIO_PROCESS, threading.get_native_id()) < NICE
    finally:
        torch.set_num_threads(before)
