"""One small case of every GPU kernel under compute-sanitizer's memcheck, where that tool is there.

    python -m tests.gpu.memcheck

runs those cases by itself; the part runs that below the tool.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import torch

from slipstream import kernels
from slipstream.kernels import dispatch
from tests.gpu.dice import Dice
from tests.gpu.draws import MAKERS
from tests.gpu.parity import ONE_DTYPE
from tests.gpu.setting import Finding, Findings, Setting

PLACES = ("/usr/local/cuda/bin",)
FOUND = 9  # exit status of the tool if it has found something
MARK, RAISED = "case ", "raised "


def cases(setting: Setting) -> list[str]:
    return ["kernels"]


def run(setting: Setting, case: str) -> Findings:
    tool = shutil.which("compute-sanitizer", path=os.pathsep.join([os.environ.get("PATH", ""), *PLACES]))
    if tool is None or not setting.on_gpu:
        why = "the device is not a GPU" if tool else "compute-sanitizer is not on the PATH"
        yield Finding("memcheck", None, {"why": why})
        return
    command = [
        tool,
        "--tool",
        "memcheck",
        "--error-exitcode",
        str(FOUND),
        sys.executable,
        "-m",
        "tests.gpu.memcheck",
    ]
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}  # so that tensors end where they end
    root = Path(__file__).parents[2]
    process = subprocess.Popen(
        command, cwd=root, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        output, _ = process.communicate(timeout=max(1.0, setting.left_s()))
        late = False
    except subprocess.TimeoutExpired:
        process.kill()
        output, _ = process.communicate()
        late = True
    yield from told(output, process.returncode, late=late)


def told(output: str, status: int, *, late: bool) -> Findings:
    """One finding per kernel, from what the tool and the cases have printed."""
    blocks = output.split(f"\n{MARK}")
    for i, block in enumerate(blocks[1:], 1):
        label, _, rest = block.partition("\n")
        faults = [
            line
            for line in rest.splitlines()
            if "Invalid" in line or "misaligned" in line or line.startswith(RAISED)
        ]
        if faults:
            yield Finding(label, ok=False, figures={"why": faults[0].strip("= ")})
        elif i == len(blocks) - 1 and late:
            yield Finding(label, None, {"why": "no time left"})
        else:
            yield Finding(label, ok=True)
    if status not in (0, FOUND) and not late:
        yield Finding("memcheck", ok=False, figures={"why": f"ended with {status}: {output[-600:]}"})
    elif status == FOUND:
        yield Finding("memcheck", ok=False, figures={"why": output[-600:]})


def main() -> None:
    device = torch.device("cuda")
    for dtype in (torch.bfloat16, torch.float32):
        kernels.select(device, dtype)
    for folder, make in MAKERS.items():
        dtype = torch.float32 if folder in ONE_DTYPE else torch.bfloat16
        for name in dispatch.made_for(folder, device):
            if name == "reference" or dispatch._refusal(folder, name, device, dtype) is not None:
                continue
            sys.stdout.write(f"\n{MARK}{folder}.{name}\n")
            sys.stdout.flush()
            draw = make(Dice(1, dtype, quick=False))
            try:
                with kernels.use(name, folder):
                    draw.call({key: value.to(device) for key, value in draw.tensors.items()})
                torch.cuda.synchronize()
            except Exception as error:  # noqa: BLE001 - the next kernel has its turn, if the context still serves
                sys.stdout.write(f"{RAISED}{type(error).__name__}: {error}\n")


if __name__ == "__main__":
    with torch.inference_mode():
        main()
