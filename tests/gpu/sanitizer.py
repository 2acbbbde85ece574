"""One small case of every GPU kernel under compute-sanitizer, where that tool is there.

    python3 -m tests.gpu.sanitizer

runs those cases by itself; the part runs that below memcheck, racecheck and synccheck.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

import torch

from slipstream import kernels
from slipstream.kernels import dispatch
from tests.gpu import group
from tests.gpu.dice import Dice, Draw
from tests.gpu.draws import MAKERS
from tests.gpu.parity import ONE_DTYPE
from tests.gpu.setting import Finding, Findings, Setting, not_measured

TOOLS = ("memcheck", "racecheck", "synccheck")
FOUND = 9  # exit status of the tool if it has found something
MARK, RAISED = "case ", "raised "
FAULTS = ("Invalid", "misaligned", "Race reported", "hazard detected", "Barrier error", "Divergent thread")
# cuda.bindings asks an older driver for functions that it lacks, and takes the answer.
OPTIONS = {"memcheck": ("--report-api-errors", "no")}


def cases(setting: Setting) -> list[str]:
    return list(TOOLS)


def run(setting: Setting, case: str) -> Findings:
    tool = group.tool("compute-sanitizer")
    if tool is None or not setting.on_gpu:
        yield not_measured(case, "the device is no GPU" if tool else "compute-sanitizer is not on the PATH")
        return
    seconds = setting.left_s() / (len(TOOLS) - TOOLS.index(case))
    ended = group.run(
        [
            *(tool, "--tool", case, "--error-exitcode", str(FOUND), *OPTIONS.get(case, ())),
            *(sys.executable, "-m", "tests.gpu.sanitizer"),
        ],
        seconds,
        {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},  # so that tensors end where they end
    )
    yield from findings(case, ended)


def findings(tool: str, ended: group.Ended) -> Findings:
    """One per kernel, from what the tool and the cases have printed."""
    blocks, any_faulty = ended.output.split(f"\n{MARK}"), False
    for i, block in enumerate(blocks[1:], 1):
        label, _, rest = block.partition("\n")
        label = f"{label}, {tool}"
        faults = [
            line
            for line in rest.splitlines()
            if line.startswith(RAISED) or any(one in line for one in FAULTS)
        ]
        any_faulty |= bool(faults)
        if faults:
            yield Finding(label, ok=False, figures={"why": faults[0].strip("= ")})
        elif i == len(blocks) - 1 and ended.is_late:
            yield not_measured(label, "no time left")
        else:
            yield Finding(label, ok=True)
    if ended.is_late and len(blocks) == 1:
        yield not_measured(tool, "no time left before the first case")
    elif ended.status not in (0, FOUND) and not ended.is_late:
        yield Finding(tool, ok=False, figures={"why": f"ended with {ended.status}: {ended.output[-600:]}"})
    elif ended.status == FOUND:
        where = ended.output if any_faulty else blocks[0]  # which is before the first case
        yield Finding(tool, ok=False, figures={"why": where[:600]})


def draws(device: torch.device) -> Iterator[tuple[str, str, Draw]]:
    """(op, implementation, a small call of it) of everything but references that runs on the device."""
    for dtype in (torch.bfloat16, torch.float32):
        kernels.select(device, dtype)
    for folder, make in MAKERS.items():
        dtype = torch.float32 if folder in ONE_DTYPE else torch.bfloat16
        for name in dispatch.candidates(folder, device, dtype):
            if name != "reference":
                yield folder, name, make(Dice(1, dtype, quick=False))


def main() -> None:
    device = torch.device("cuda")
    for folder, name, draw in draws(device):
        sys.stdout.write(f"\n{MARK}{folder}.{name}\n")
        sys.stdout.flush()
        try:
            with kernels.use(name, folder):
                draw.call({key: value.to(device) for key, value in draw.tensors.items()})
            torch.cuda.synchronize()
        except Exception as error:  # noqa: BLE001 - the next kernel has its turn, if the context still serves
            sys.stdout.write(f"{RAISED}{type(error).__name__}: {error}\n")


if __name__ == "__main__":
    with torch.inference_mode():
        main()
