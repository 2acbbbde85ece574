"""The head of a request, its line and headers, as the server takes it: of a limited size.

h11 measures a head that is not complete, so one that came whole in a single read could be of any size.
"""

from __future__ import annotations

import re
from typing import Any

import h11

HEAD_LIMIT = 1 << 16  # bytes, the empty line at the end included
END = re.compile(rb"\n\r?\n")


class RequestHeads(h11.Connection):
    """h11's side of the server. `next_event` raises h11's `RemoteProtocolError` for a head that is not taken.

    `is_too_long` then says whether its size is why.
    """

    def __init__(self) -> None:
        super().__init__(h11.SERVER, HEAD_LIMIT)
        self.is_too_long = False

    def next_event(self) -> Any:
        if self.their_state is h11.IDLE and _is_too_long(self.trailing_data[0]):
            self.is_too_long = True
            raise h11.RemoteProtocolError("the request's head is too long")
        return super().next_event()


def _is_too_long(received: bytes) -> bool:
    """Whether these bytes, of which the first are a head's, have no end of it within the limit."""
    return len(received) > HEAD_LIMIT and END.search(received, 0, HEAD_LIMIT) is None
