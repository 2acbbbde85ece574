"""The thread that looks at images, in their order of arrival, and those who wait for what it sees."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import torch

from slipstream.engine.api import Image
from slipstream.engine.batch import use_device
from slipstream.engine.device_loss import device_loss
from slipstream.engine.errors import EngineError, EngineStopped, StepFailed
from slipstream.engine.images import ImageFeatures, ImageLayout
from slipstream.server.vision.family import Family
from slipstream.server.vision.kept_features import KeptFeatures
from slipstream.server.vision.modest_thread import be_modest

log = logging.getLogger(__name__)

CLOSING_S = 10.0  # that `close` waits for an image that is being looked at


@dataclass(slots=True)
class Waiting:
    """An image that is to be looked at, once, for all who have asked for it."""

    image: Image
    futures: list[Future[ImageFeatures]] = field(default_factory=list)


class Watching:
    """A family's `Vision`: its layouts, and features by a thread of their own, kept for images that come again."""

    def __init__(self, family: Family, n_bytes_kept: int) -> None:
        """n_bytes_kept: how many bytes of features are kept."""
        self.marker, self.written, self.placeholder = family.marker, family.written, family.placeholder
        self.family = family
        self.kept = KeptFeatures(n_bytes_kept)
        self._changed = threading.Condition()
        self._waiting: dict[bytes, Waiting] = {}  # by key; in order of arrival, the first being looked at
        self._end: EngineError | None = None  # why nothing is looked at any more
        self._thread = threading.Thread(target=self._run, name="vision", daemon=True)
        self._thread.start()

    def layout(self, width: int, height: int) -> ImageLayout:
        return self.family.layout(width, height)

    def features(self, image: Image) -> Future[ImageFeatures]:
        future: Future[ImageFeatures] = Future()
        key = image.key  # a hash of all pixels, so not under the lock
        with self._changed:
            if self._end is not None:
                future.set_exception(self._end)
            elif (kept := self.kept.get(key)) is not None:
                future.set_result(kept)
            else:
                self._waiting.setdefault(key, Waiting(image)).futures.append(future)
                self._changed.notify()
        return future

    def close(self) -> None:
        """Fail what waits, and end the thread; waits for the image that it looks at."""
        self._stop(EngineStopped("the server is stopping, and looks at no more images"))
        self._thread.join(CLOSING_S)

    def _stop(self, why: EngineError) -> None:
        with self._changed:
            self._end = self._end or why
            futures = [future for one in self._waiting.values() for future in one.futures]
            self._waiting.clear()
            self.kept.clear()
            self._changed.notify()
        for future in futures:
            resolve(future, lambda one: one.set_exception(why))

    def _run(self) -> None:
        be_modest()
        sees = on_own_stream(self.family)
        while (waiting := self._next()) is not None:
            try:
                features = checked(
                    sees(waiting.image), self.layout(waiting.image.width, waiting.image.height)
                )
            except BaseException as error:
                if (lost := device_loss(error)) is not None:
                    self._stop(lost)
                    return
                log.warning("an image could not be looked at", exc_info=error)
                failed = StepFailed("the model could not look at an image; the log says why")
                failed.__cause__ = error
                self._settle(waiting, None, failed)
            else:
                self._settle(waiting, features, None)

    def _next(self) -> Waiting | None:
        """The image that came first and that somebody still waits for; None: there will be no more."""
        with self._changed:
            while self._end is None:
                for key, waiting in list(self._waiting.items()):
                    if not all(future.cancelled() for future in waiting.futures):
                        return waiting
                    del self._waiting[key]
                self._changed.wait()
        return None

    def _settle(self, waiting: Waiting, features: ImageFeatures | None, error: StepFailed | None) -> None:
        with self._changed:
            if self._waiting.pop(waiting.image.key, None) is None:
                return  # closed meanwhile, and its futures have failed
            if features is not None:
                self.kept.keep(waiting.image.key, features)
        for future in waiting.futures:
            if error is not None:
                resolve(future, lambda one: one.set_exception(error))
            elif features is not None:
                resolve(future, lambda one: one.set_result(features))


def resolve(future: Future[ImageFeatures], how: Callable[[Future[ImageFeatures]], None]) -> None:
    """Resolve a future that nobody has cancelled."""
    if future.set_running_or_notify_cancel():
        how(future)


def checked(features: ImageFeatures, layout: ImageLayout) -> ImageFeatures:
    """The features, if they are what the layout says. Raises `ValueError`."""
    n_rows = int(layout.is_row.sum())
    if len(features.rows) != n_rows:
        raise ValueError(f"the tower gives {len(features.rows)} rows where the layout has {n_rows}")
    if not all(bool(torch.isfinite(one).all()) for one in (features.rows, features.deep) if one is not None):
        raise ValueError("its features are not finite")
    return features


def on_own_stream(family: Family) -> Callable[[Image], ImageFeatures]:
    """What looks at an image; on CUDA beside the engine's passes and not in between them."""
    device = family.parts.device
    if device.type != "cuda":
        return family.look
    use_device(device)
    own: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    own.wait_stream(torch.cuda.current_stream(device))  # the weights are there

    def look(image: Image) -> ImageFeatures:
        with torch.cuda.stream(own):
            seen = family.look(image)
        own.synchronize()
        # Copied into memory of the stream that reads them, which is not given back to the tower while it is read.
        copy = ImageFeatures(seen.rows.clone(), None if seen.deep is None else seen.deep.clone())
        torch.cuda.current_stream(device).synchronize()
        return copy

    return look
