"""The head of a request, its line and headers, as the server takes it: of a limited size, its target a path.

h11 measures a head that is not complete, so one that came whole in a single read could be of any size. It passes every
target on; an absolute one, as clients send to proxies, is answered like its path (RFC 9112, 3.2.2).
"""

from __future__ import annotations

import re
from typing import Any

import h11

HEAD_LIMIT = 1 << 16  # bytes, the empty line at the end included
END = re.compile(rb"\n\r?\n")
# https too: it is what a gateway sends on that speaks TLS to the client.
IS_ABSOLUTE = re.compile(rb"https?:", re.IGNORECASE)
# Without a user before the host (RFC 9110, 4.2.4), or a fragment.
ABSOLUTE = re.compile(
    rb"https?://(?P<host>(?:\[[0-9a-f:.]+\]|[a-z0-9._~%!$&'()*+,;=-]+)(?::[0-9]*)?)(?P<path>/[^?#]*)?(?P<query>\?[^#]*)?",
    re.IGNORECASE,
)


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
        event = super().next_event()
        if isinstance(event, h11.Request) and IS_ABSOLUTE.match(event.target):
            return _by_path(event)
        return event


def _is_too_long(received: bytes) -> bool:
    """Whether these bytes, of which the first are a head's, have no end of it within the limit."""
    return len(received) > HEAD_LIMIT and END.search(received, 0, HEAD_LIMIT) is None


def _by_path(request: h11.Request) -> h11.Request:
    """The request with its target's path for a target, and its target's host instead of the header's.

    All that asks for path or host then sees one of each. Raises h11's `RemoteProtocolError`.
    """
    found = ABSOLUTE.fullmatch(request.target)
    if found is None:
        raise h11.RemoteProtocolError("the target is no http URL with a host")
    others = [(name, value) for name, value in request.headers if name != b"host"]
    return h11.Request(
        method=request.method,
        headers=[(b"host", found["host"]), *others],
        target=(found["path"] or b"/") + (found["query"] or b""),
        http_version=request.http_version,
    )
