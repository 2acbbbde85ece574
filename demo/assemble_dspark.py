"""Write the demo's DSpark head as one checkpoint folder, in the layout of published ones.

A DSpark checkpoint holds a DFlash and two small heads. The repository has the DFlash already, in `dflash/`, so
`dspark/` holds only what is added to it. Run as `python -m demo.assemble_dspark FOLDER`, then serve with
`-m demo/target -md FOLDER`.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

from safetensors.torch import load_file, save_file

FOLDER = Path(__file__).parent
PARTS = ("dflash", "dspark")


def assemble(out: Path, demo: Path = FOLDER) -> Path:
    """The folder `out` with all tensors of both parts under DSpark's config; demo: holds the parts."""
    out.mkdir(parents=True, exist_ok=True)
    held = {}
    for part in PARTS:
        held |= load_file(str(demo / part / "model.safetensors"))
    # A rename is atomic, so a reader never sees half a file.
    partial = out / "model.safetensors.partial"
    save_file(held, str(partial), metadata={"format": "pt"})
    partial.chmod(0o644)
    partial.replace(out / "model.safetensors")
    shutil.copyfile(demo / PARTS[-1] / "config.json", out / "config.json")
    return out


def main() -> None:
    """Write the folder that is named on the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="is made, or written over")
    assemble(parser.parse_args().folder)


if __name__ == "__main__":
    main()
