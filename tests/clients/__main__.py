"""Runs the clients: `python -m tests.clients [NAME …]`.

Each client has an environment of its own, as they disagree about what they need; it is made on first use and when the
client's requirements have changed. A file `requirements/NAME.txt` is for pip, a folder `requirements/NAME` for npm.
One server on the demo pair serves them one after another; what the demo model cannot do, thinking, another one does
over a scripted engine.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
import venv
from collections.abc import Sequence
from pathlib import Path

from tests.process import DEMO, FAKE, ROOT, Running, running

FOLDER = Path(__file__).parent
REQUIREMENTS = {path.stem: path for path in sorted((FOLDER / "requirements").iterdir())}
PLACE = ROOT / ".venv-clients"
SETTINGS = ("--ctx-size", "2048", "--parallel", "4", "--spec-type", "auto")


def main(names: Sequence[str]) -> int:
    unknown = set(names) - set(REQUIREMENTS)
    if unknown:
        sys.stderr.write(
            f"no such client: {', '.join(sorted(unknown))}; there are {', '.join(REQUIREMENTS)}\n"
        )
        return 2
    chosen = names or list(REQUIREMENTS)
    if any(REQUIREMENTS[name].is_dir() for name in chosen) and not shutil.which("npm"):
        sys.stderr.write("clients in JavaScript need Node.js with npm, which is not on the path\n")
        return 2
    for name in chosen:
        prepare(name)
    with (
        tempfile.TemporaryDirectory() as folder,
        running(Path(folder) / "demo.log", (*DEMO, *SETTINGS)) as demo,
        running(Path(folder) / "thinking.log", ("-m", "THINKING"), FAKE) as thinking,
    ):
        servers = (demo, thinking)
        failed = [name for name in chosen if not passes(name, *servers)]
        surprises = [line for one in servers for line in one.surprises()]
        statuses = [one.stop() for one in servers]
    sys.stdout.writelines(f"in the server's log: {line}\n" for line in surprises[:5])
    return 1 if failed or surprises or any(statuses) else 0


def prepare(name: str) -> None:
    """The client's environment, if it is not there yet. Raises CalledProcessError if it cannot be made."""
    wanted, place = REQUIREMENTS[name], PLACE / name
    lock = wanted / "package-lock.json" if wanted.is_dir() else wanted
    stamp = place / "installed"
    if stamp.exists() and stamp.read_text() == lock.read_text():
        return
    sys.stdout.write(f"{name}: installing\n")
    sys.stdout.flush()
    if wanted.is_dir():
        shutil.rmtree(place, ignore_errors=True)
        shutil.copytree(wanted, place)
        subprocess.run(["npm", "ci", "--ignore-scripts", "--no-audit", "--no-fund"], cwd=place, check=True)
    else:
        venv.create(place, with_pip=True, clear=True)
        pip = [str(place / "bin" / "pip"), "install", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*pip, "-r", str(wanted)], check=True)
    stamp.write_text(lock.read_text())


def passes(name: str, demo: Running, thinking: Running) -> bool:
    """Whether the client's tests pass."""
    started = time.monotonic()
    # Whatever a client takes from its user's environment is not to be had here.
    environ = {
        key: value
        for key, value in os.environ.items()
        if not key.startswith(("OPENAI_", "ANTHROPIC_", "LITELLM_", "LANG", "SLIP"))
    }
    environ |= {"CLIENT_TEST_URL": demo.url, "CLIENT_TEST_THINKING_URL": thinking.url}
    environ |= {"LANGSMITH_TRACING": "false", "PYTHONDONTWRITEBYTECODE": "1"}
    is_well = subprocess.run(_program(name), cwd=FOLDER, env=environ, check=False).returncode == 0
    seconds = time.monotonic() - started
    sys.stdout.write(f"{name}: {'ok' if is_well else 'FAILED'}, {seconds:.0f} s\n")
    return is_well


def _program(name: str) -> list[str]:
    place = PLACE / name
    if REQUIREMENTS[name].is_dir():
        # A module's imports are looked for beside it.
        tests = shutil.copy(FOLDER / f"with_{name}.mjs", place)
        return ["node", "--test", "--test-reporter=spec", str(tests)]
    pytest = [str(place / "bin" / "python"), "-m", "pytest", "-c", str(FOLDER / "pytest.ini")]
    return [*pytest, "--rootdir", str(FOLDER), "--confcutdir", str(FOLDER), str(FOLDER / f"with_{name}.py")]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
