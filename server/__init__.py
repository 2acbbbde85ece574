"""The HTTP side: OpenAI's API, some of llama-server's, the web page. Knows `engine.{api,settings,errors}`."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as _installed


def version() -> str:
    """The server's version, as it was installed."""
    try:
        return _installed("slipstream")
    except PackageNotFoundError:
        return "(not installed)"
