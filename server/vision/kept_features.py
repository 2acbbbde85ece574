"""What the model has seen in images, by what they show, within so many bytes: the least recently used goes first."""

from __future__ import annotations

from collections import OrderedDict

from slipstream.engine.images import ImageFeatures


class KeptFeatures:
    """Not safe to use from several threads at once."""

    def __init__(self, n_bytes_most: int) -> None:
        self.n_bytes_most = n_bytes_most
        self.n_bytes = 0
        self._kept: OrderedDict[bytes, ImageFeatures] = OrderedDict()  # the least recently used first

    def __len__(self) -> int:
        return len(self._kept)

    def get(self, key: bytes) -> ImageFeatures | None:
        if key not in self._kept:
            return None
        self._kept.move_to_end(key)
        return self._kept[key]

    def keep(self, key: bytes, features: ImageFeatures) -> None:
        """Keep an image's features, unless they are larger than all that may be kept."""
        if features.n_bytes > self.n_bytes_most:
            return
        if (before := self._kept.pop(key, None)) is not None:
            self.n_bytes -= before.n_bytes
        self._kept[key] = features
        self.n_bytes += features.n_bytes
        while self.n_bytes > self.n_bytes_most:
            _, oldest = self._kept.popitem(last=False)
            self.n_bytes -= oldest.n_bytes

    def clear(self) -> None:
        self._kept.clear()
        self.n_bytes = 0
