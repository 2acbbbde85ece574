"""Engines that measure their passes for a tenth of the time when they warm up: half of what a launch takes.

For tests that are not about speed; texts do not depend on what passes cost.
"""

from __future__ import annotations

from typing import Any

from slipstream.engine.core.warm import warm_up


def shortly(*parts: Any) -> None:
    """In the place of `warm_up` in slipstream.engine.core.engine."""
    *others, enough_s = parts
    warm_up(*others, enough_s / 10)
