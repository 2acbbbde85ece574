"""Decoding images in child processes (`pillow_process.py`): a few at a time, each within its time.

A child is started at first use and stays; one that is lost, or takes too long, ends that image alone.
"""

from __future__ import annotations

import asyncio
import json
import logging
import signal
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue

from slipstream.engine.api import Image
from slipstream.kernels.child_process import ChildProcess
from slipstream.server.images.image_part import ImageRefused

log = logging.getLogger(__name__)

CHILD = "slipstream.server.images.pillow_process"
AT_ONCE = 2
_START_S = 30.0  # that a child may take besides, if it has to start first


class Decoder:
    """A child process. One thread at a time."""

    def __init__(self, most_pixels: int, timeout_s: float) -> None:
        self.most_pixels = most_pixels
        self.timeout_s = timeout_s
        self._child: ChildProcess | None = None

    @property
    def pid(self) -> int | None:
        return self._child.process.pid if self._child else None

    def decode(self, coding: str, data: bytes) -> Image:
        """The picture of a file. coding: `raw` or `base64`. Raises `ImageRefused`."""
        try:
            is_new = self._child is None
            self._child = self._child or ChildProcess(CHILD, str(self.most_pixels), str(self.timeout_s))
            pipe = self._child.pipe
            pipe.send_bytes(coding.encode())
            pipe.send_bytes(data)
            if not pipe.poll(self.timeout_s + _START_S * is_new):
                raise TimeoutError
            told = json.loads(pipe.recv_bytes())
            if "reason" in told:
                raise ImageRefused(told["reason"])
            image = Image(told["width"], told["height"], pipe.recv_bytes())
        except TimeoutError:
            self.close()
            raise ImageRefused(self._too_slow()) from None
        except (OSError, EOFError) as error:
            raise ImageRefused(self._lost(error)) from None
        if len(image.pixels) != 3 * image.width * image.height:
            self.close()
            raise ImageRefused("its decoder gave an impossible answer")
        _ = image.key  # takes a tenth of a second for a large image, which the event loop has not
        return image

    def close(self) -> None:
        """End the child."""
        if self._child is not None:
            self._child.end()
            self._child = None

    def _lost(self, error: Exception) -> str:
        """What became of the child, which is ended."""
        child = self._child
        self.close()
        if child is not None and child.process.returncode == -signal.SIGXCPU:
            return self._too_slow()
        log.warning("the process that decodes images was lost: %r", error)
        return "the process that decodes images was lost over it"

    def _too_slow(self) -> str:
        return f"decoding it took longer than {self.timeout_s:g} s (--image-timeout)"


class Decoders:
    """Some decoders; more images at once wait."""

    def __init__(self, most_pixels: int, timeout_s: float) -> None:
        self._threads = ThreadPoolExecutor(AT_ONCE, thread_name_prefix="images")
        self._idle: SimpleQueue[Decoder] = SimpleQueue()
        for _ in range(AT_ONCE):
            self._idle.put(Decoder(most_pixels, timeout_s))

    async def decode(self, coding: str, data: bytes) -> Image:
        """As `Decoder.decode`, without holding up the event loop."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, self._decode, coding, data)

    def _decode(self, coding: str, data: bytes) -> Image:
        decoder = self._idle.get()
        try:
            return decoder.decode(coding, data)
        finally:
            self._idle.put(decoder)
