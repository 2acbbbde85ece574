"""Runs the clients: `python -m tests.clients [NAME …]`.

Each client has an environment of its own, as they disagree about what they need; it is made on first use and when the
client's requirements have changed. One server on the demo pair serves them one after another.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
import venv
from collections.abc import Sequence
from pathlib import Path

from tests.process import DEMO, ROOT, running

FOLDER = Path(__file__).parent
CLIENTS = tuple(sorted(path.stem for path in (FOLDER / "requirements").glob("*.txt")))
PLACE = ROOT / ".venv-clients"
SETTINGS = ("--ctx-size", "2048", "--parallel", "4", "--spec-type", "auto")


def main(names: Sequence[str]) -> int:
    unknown = set(names) - set(CLIENTS)
    if unknown:
        sys.stderr.write(f"no such client: {', '.join(sorted(unknown))}; there are {', '.join(CLIENTS)}\n")
        return 2
    chosen = names or CLIENTS
    for name in chosen:
        _prepare(name)
    failed = []
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "server.log"
        with running(log, (*DEMO, *SETTINGS)) as server:
            for name in chosen:
                started = time.monotonic()
                status = _test(name, server.url)
                sys.stdout.write(
                    f"{name}: {'ok' if status == 0 else 'FAILED'}, {time.monotonic() - started:.0f} s\n"
                )
                failed += [name] if status else []
            surprises = server.surprises()
            status = server.stop()
    sys.stdout.writelines(f"in the server's log: {line}\n" for line in surprises[:5])
    return 1 if failed or surprises or status else 0


def _prepare(name: str) -> None:
    """The client's environment, if it is not there yet."""
    wanted = FOLDER / "requirements" / f"{name}.txt"
    place, stamp = PLACE / name, PLACE / name / "requirements.txt"
    if stamp.exists() and stamp.read_text() == wanted.read_text():
        return
    sys.stdout.write(f"{name}: installing\n")
    sys.stdout.flush()
    venv.create(place, with_pip=True, clear=True)
    install = [
        str(place / "bin" / "pip"),
        "install",
        "--quiet",
        "--disable-pip-version-check",
        "-r",
        str(wanted),
    ]
    subprocess.run(install, check=True)
    stamp.write_text(wanted.read_text())


def _test(name: str, url: str) -> int:
    # Whatever a client takes from its user's environment is not to be had here.
    environ = {
        key: value
        for key, value in os.environ.items()
        if not key.startswith(("OPENAI_", "ANTHROPIC_", "LITELLM_", "LANG", "SLIP"))
    }
    environ |= {"CLIENT_TEST_URL": url, "LANGSMITH_TRACING": "false", "PYTHONDONTWRITEBYTECODE": "1"}
    program = [str(PLACE / name / "bin" / "python"), "-m", "pytest", "-c", str(FOLDER / "pytest.ini")]
    arguments = ["--rootdir", str(FOLDER), "--confcutdir", str(FOLDER), str(FOLDER / f"with_{name}.py")]
    return subprocess.run([*program, *arguments], cwd=FOLDER, env=environ, check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
