"""Speed, against the device's ceilings, plain decoding, transformers and other servers.

    make bench                                    # the demo at 0.44B and as it is; on CUDA at 8B
    make bench ARGS="--model 0.6B --parts width drafters --peer llama=http://127.0.0.1:8081"
    make bench ARGS="--model 0.54B-hybrid --out /tmp/figures --page docs/performance.md"

Models are the demo's, inflated (tests/bench/models.py), or a folder. OUT gets bench-device-date.json and .md after each
part, so that a run that was broken off goes on with `--resume THAT.json`, and a plot per question at the end. Run it
with nothing beside it. `--quick` runs every part at tiny sizes: whether the command works, not what a machine is worth.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch

from slipstream.engine.batch import numbered
from tests.bench import drafting, passes, peers, plots, report
from tests.bench.models import CACHE, MODELS, load
from tests.bench.page import renew
from tests.bench.scene import Scene
from tests.gpu.setting import Findings, Setting

PARTS: Mapping[str, Callable[[Scene], Findings]] = {
    "ceilings": passes.ceilings,
    "width": passes.width,
    "context": passes.context,
    "prompt": passes.prompt,
    "host": passes.host,
    "memory": passes.memory,
    "drafters": drafting.drafters,
    "concurrency": drafting.concurrency,
    "peers": peers.peers,
    "acceptance": drafting.acceptance,
    "prediction": drafting.prediction,
}
EXTRA = (
    "acceptance",
    "prediction",
)  # tokens, not seconds: the same on every machine, so only where they are asked for
RESULTS = Path(__file__).parent / "results"
N_CTX = {"cpu": 8192 + 64, "cuda": 32_768 + 64}


class Notes:
    """What has been found, in the files of the run after each part."""

    def __init__(self, folder: Path, data: report.Record) -> None:
        self.data, self._folder, self._started = data, folder, time.monotonic() - data["seconds"]
        self.files: list[Path] = []

    def has(self, model: str, part: str) -> bool:
        return any(
            (one["model"], one["part"]) == (model, part) and one["ok"] is None
            for one in self.data["findings"]
        )

    def take(self, scene: Scene, part: str) -> None:
        """Run a part. What it raises is a finding too."""
        found = self.data["findings"]
        found[:] = [one for one in found if (one["model"], one["part"]) != (scene.name, part)]
        try:
            for one in PARTS[part](scene):
                self._add(scene.name, part, one.name, one.figures)
        except Exception as error:  # noqa: BLE001 - the other parts have their turn
            traceback.print_exc()
            self._add(scene.name, part, part, {"why": f"{type(error).__name__}: {error}"[:300]}, ok=False)
        found.sort(key=lambda one: list(self.data["models"]).index(one["model"]))
        self.data["seconds"] = round(time.monotonic() - self._started, 1)
        self.files = report.write(self._folder, self.data)

    def _add(
        self, model: str, part: str, name: str, figures: report.Record, *, ok: bool | None = None
    ) -> None:
        self.data["findings"].append(
            {"model": model, "part": part, "name": name, "ok": ok, "figures": figures}
        )
        spent = time.monotonic() - self._started
        sys.stdout.write(f"{spent:6.0f} s  {model} {part:11} {name:36} {report.told(figures)}\n")
        sys.stdout.flush()


def main(arguments: Sequence[str]) -> int:
    """The exit status: 1 if a part raised, 2 for arguments that cannot be."""
    options = parser().parse_args(arguments)
    on_gpu = torch.cuda.is_available() and options.device != "cpu"
    device = numbered(torch.device("cuda" if on_gpu else "cpu"))
    if device.type != options.device and options.device != "auto":
        sys.stderr.write(f"--device {options.device}: there is none here\n")
        return 2
    if options.threads:
        torch.set_num_threads(options.threads)
    data = report.heading(
        device, " ".join(("make bench", f'ARGS="{" ".join(arguments)}"' if arguments else "")).strip()
    )
    if options.resume:
        before = json.loads(options.resume.read_text())
        data |= {name: before[name] for name in ("findings", "seconds", "models")}
        data["command"] = f"{before['command']}; {data['command']}"
    notes = Notes(options.out, data)
    for name in options.model or (("8B", "demo") if device.type == "cuda" else ("0.44B", "demo")):
        parts = [part for part in options.parts if not (options.resume and notes.has(name, part))]
        try:
            play(name, parts, notes, device, options)
        except ValueError as error:
            sys.stderr.write(f"{error}\n")
            return 2
    if options.plots:
        notes.files += plots.draw(data, notes.files[0].parent, notes.files[0].stem)
    if options.page:
        renew(options.page, data)
    sys.stdout.write("".join(f"{file}\n" for file in notes.files))
    return int(any(one["ok"] is False for one in data["findings"]))


@torch.inference_mode()
def play(
    name: str, parts: Sequence[str], notes: Notes, device: torch.device, options: argparse.Namespace
) -> None:
    """The parts on one model. Raises ValueError for a model that is not known."""
    if not parts:
        return
    setting = Setting(device, options.quick, time.monotonic() + 1e9)
    dtype = getattr(torch, options.dtype)
    n_ctx = 1024 if options.quick else N_CTX[device.type]
    started = time.perf_counter()
    lab = load(name, options.cache, dtype, device, n_ctx)
    scene = Scene(name, lab, setting, peers=dict(options.peer))
    notes.data["models"][name] = {
        "million parameters": lab.target.n_params / 1e6,
        "million of the draft": 0.0 if lab.draft is None else lab.draft.n_params / 1e6,
        "dtype": options.dtype,
        "loaded in, s": time.perf_counter() - started,
    }
    for part in parts:
        notes.take(scene, part)


def named_url(text: str) -> tuple[str, str]:
    """NAME=URL."""
    name, _, url = text.partition("=")
    if not name or not url.startswith(("http://", "https://")):
        raise argparse.ArgumentTypeError(f"{text}: must be NAME=http://…")
    return name, url


def parser() -> argparse.ArgumentParser:
    known = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    known.add_argument("--model", nargs="+", help=f"{', '.join(MODELS)}, or folders")
    known.add_argument(
        "--parts", nargs="+", choices=list(PARTS), default=[one for one in PARTS if one not in EXTRA]
    )
    known.add_argument("--device", default="auto", choices=["auto", "cpu", "cuda"])
    known.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    known.add_argument("--threads", type=int, help="of torch")
    known.add_argument(
        "--peer", nargs="+", type=named_url, default=[], metavar="NAME=URL", help="another server"
    )
    known.add_argument("--out", type=Path, default=RESULTS)
    known.add_argument("--cache", type=Path, default=CACHE, help="folder of inflated checkpoints")
    known.add_argument("--quick", action="store_true", help="tiny sizes")
    known.add_argument("--resume", type=Path, metavar="JSON", help="leave out what this run has already")
    known.add_argument("--no-plots", dest="plots", action="store_false", help="do without matplotlib")
    known.add_argument("--page", type=Path, help="renew this page and the plots beside it, too")
    return known
