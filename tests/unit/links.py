"""What an index of occurrences holds, in a form that can be compared."""

from __future__ import annotations

import numpy as np

from slipstream.engine.speculate.text.occurrences import Occurrences


def links(index: Occurrences) -> list[dict[int, int]]:
    """Per run length: each place and the place before it of the same run, 0 if it is the run's first.

    All there is to know of an index, whatever way it came about: equal texts have equal links.
    """
    found = []
    for newest, before in zip(index._newest, index._before, strict=True):
        linked: dict[int, int] = {}
        for entry in newest[newest > 0]:
            place = int(entry & np.uint64(0xFFFFFFFF))
            while place > 0:
                linked[place] = int(before[place])
                place = linked[place]
        found.append(linked)
    return found
