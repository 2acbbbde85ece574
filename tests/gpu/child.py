"""The process that does the work: runs the cases of a plan of parts, and writes a line per finding.

A case that raises is a finding too. After a CUDA error the process leaves, because nothing runs in its context any
more; whoever started it starts another one for the rest.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import re
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

import torch

from slipstream.engine.batch import numbered
from slipstream.kernels.device_fault import is_device_fault
from tests.gpu.setting import Finding, Setting, not_measured

SPOILT = 3  # exit status: the CUDA context is of no use any more


class Lines:
    """Where findings are written to, one JSON object a line."""

    def __init__(self, file: TextIO) -> None:
        self._file = file

    def write(self, kind: str, part: str, **values: Any) -> None:
        self._file.write(json.dumps({"kind": kind, "part": part, **values}) + "\n")
        self._file.flush()

    def finding(self, part: str, case: str, finding: Finding) -> None:
        self.write("finding", part, case=case, name=finding.name, ok=finding.ok, figures=finding.figures)


def run_part(plan: Mapping[str, Any], setting: Setting, lines: Lines) -> None:
    """The cases of one part but those that are to be skipped."""
    part = plan["part"]
    lines.write("begin", part, case="")
    try:
        module = importlib.import_module(f"tests.gpu.{plan['module']}")
        found = [case for case in module.cases(setting) if re.match(plan["cases"], case)]
        cases = [case for case in found if case not in plan["skip"]]
    except Exception as error:  # noqa: BLE001 - whatever it is, it is reported and the next part has its turn
        _report(error, part, "", lines)
        cases = []
    else:
        lines.write("end", part, case="")
    for case in cases:
        lines.write("begin", part, case=case)
        try:
            if setting.left_s() <= 0:
                lines.finding(part, case, not_measured(case, "no time left"))
            else:
                for finding in module.run(setting, case):
                    lines.finding(part, case, finding)
                if setting.left_s() <= 0:
                    lines.finding(part, case, not_measured(f"{case}, its rest", "no time left"))
        except Exception as error:  # noqa: BLE001
            _report(error, part, case, lines)
        lines.write("end", part, case=case)
    gc.collect()
    if setting.on_gpu:
        torch.cuda.empty_cache()
    lines.write("finished", part)


def _report(error: Exception, part: str, case: str, lines: Lines) -> None:
    where = "".join(traceback.format_exception(error)[-3:]).strip()
    why = {"why": f"{type(error).__name__}: {error}"[:600], "where": where[-1200:]}
    lines.finding(part, case, Finding(case or part, ok=False, figures=why))
    if is_device_fault(error):
        lines.write("end", part, case=case)
        sys.exit(SPOILT)


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line of the process; `run.py` starts it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", required=True)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--plan", required=True, type=json.loads)
    parser.add_argument("--lines", required=True, type=Path)
    options = parser.parse_args(arguments)
    device = numbered(torch.device(options.device))
    with options.lines.open("a") as file, torch.inference_mode():
        lines = Lines(file)
        for one in options.plan:
            deadline = min(time.monotonic() + one["seconds"], one["until"])
            run_part(one, Setting(device, options.quick, deadline), lines)


if __name__ == "__main__":
    main()
