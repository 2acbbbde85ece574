"""transformers on the same weights: tokens a second of `generate`, where it is installed."""

from __future__ import annotations

import importlib

from tests.bench.transformers_side import theirs
from tests.gpu.setting import Finding, Findings, Setting, not_measured
from tests.gpu.tokens import asked, played, scene, summed

# Only with a static cache it compiles, which takes a minute.
WAYS = ("transformers", "transformers, static cache")


def cases(setting: Setting) -> list[str]:
    return list(WAYS)


def run(setting: Setting, case: str) -> Findings:
    try:
        importlib.import_module("transformers")
    except ModuleNotFoundError as error:
        yield not_measured(case, f"transformers: {error}")
        return
    (task,) = asked(setting, ("continue",), 1, setting.pick(64, 6))
    theirs_rate = theirs(scene(setting))[case](task)
    seconds, n_tokens, _ = summed(played(setting, "plain"))
    ours = n_tokens / max(seconds, 1e-9)
    figures = {"tokens/s": theirs_rate, "plain here": ours, "x": ours / theirs_rate}
    yield Finding(f"{case}, one stream", None, figures)
