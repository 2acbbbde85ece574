"""The HTTP server: OpenAI's API, some of llama-server's endpoints, the web page.

Of the engine it imports only the types in `engine.{api,settings,ranges,naming,errors}`; `command/` alone
starts an engine.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as _installed


def version() -> str:
    """The server's version, as it was installed."""
    try:
        return _installed("slipstream")
    except PackageNotFoundError:
        return "(not installed)"
