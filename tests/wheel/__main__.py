"""Installs the wheel beside Hugging Face's `kernels` and asks it something: `python -m tests.wheel [--versions WHICH]`.

The wheel is built as users build it and goes into a fresh environment, with the versions of constraints.txt; or, with
`--versions lowest`, the oldest that pyproject.toml allows, with `newest` what an index has today, but for torch. Where
requirements.txt beside this file names a package, its version counts instead: a version of transformers refuses all but
a few versions of `kernels` and then never imports it, so the two are the newest that accept each other. In the
environment `probe.py` looks at who finds what; then `slipstream` is started outside the repository, on the demo
pair, and has to answer a chat request, to have drafted for it, and to serve the page. Exit status 0 if all that holds.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
import tomllib
import urllib.request
import venv
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from slipstream.server.http.web_page import FILES
from tests.process import DEMO, ROOT, Running, running
from tests.wheel.contents import build, faults

T = TypeVar("T")
HERE = Path(__file__).parent
QUESTION = "Rename `items` to `values` in this function:\ndef first(items):\n    return items[0]"
# Nothing of the repository is to be found but what the wheel brought.
BARE = {"PYTHONPATH": "", "PYTHONSAFEPATH": "1"}
PINNED, LOWEST, NEWEST = VERSIONS = ("pinned", "lowest", "newest")
READY_S = 300.0  # the first start compiles


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--keep", type=Path, help="folder to work in, left behind afterwards")
    parser.add_argument("--versions", choices=VERSIONS, default=PINNED, help="of the dependencies")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="slipstream-wheel-") as temporary:
        work = Path(options.keep or temporary)
        work.mkdir(parents=True, exist_ok=True)
        try:
            _check(work, options.versions)
        except (AssertionError, OSError, subprocess.SubprocessError) as error:
            sys.stdout.write(f"failed: {error}\n")
            return 1
    return 0


def _check(work: Path, versions: str) -> None:
    """Every step in order. Raises AssertionError, OSError, SubprocessError."""
    wheel = _timed("wheel built", lambda: build(work / "wheel"))
    wrong = faults(wheel)
    assert not wrong, f"the wheel {', '.join(wrong)}"
    place = work / "environment"
    _timed("environment made", lambda: venv.create(place, with_pip=True, clear=True))
    _timed("installed", lambda: _install(place, wheel, versions))
    probe = [str(place / "bin" / "python"), "-I", str(HERE / "probe.py")]
    if versions == PINNED:
        _timed("kernels and transformers imported", lambda: subprocess.run(probe, cwd=work, check=True))
    _timed("server started, asked and stopped", lambda: _serve(place / "bin" / "slipstream", work))


def _install(place: Path, wheel: Path, versions: str) -> None:
    """The wheel and the requirements. torch first, in the build that the lists of packages at hand prefer."""
    own = (HERE / "requirements.txt").read_text().splitlines() if versions == PINNED else []
    pinned = (ROOT / "constraints.txt").read_text().splitlines()
    (torch,) = (line for line in pinned if _name(line) == "torch")
    if versions != PINNED:
        pinned = [*(_lowest() if versions == LOWEST else []), torch]
    named = {_name(line) for line in own}
    constraints = place.with_name("constraints.txt")
    constraints.write_text("\n".join([*(line for line in pinned if _name(line) not in named), *own]) + "\n")
    pip = [str(place / "bin" / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    for wanted in ([torch], [str(wheel), *own]):
        subprocess.run([*pip, "-c", str(constraints), *wanted], check=True)
    freeze = [str(place / "bin" / "python"), "-m", "pip", "freeze", "--exclude", "slipstream"]
    found = subprocess.run(freeze, check=True, capture_output=True, text=True).stdout
    sys.stdout.write("            " + " ".join(found.split("\n")) + "\n")


def _lowest() -> list[str]:
    """The oldest versions that pyproject.toml allows, torch aside."""
    told = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    pairs = [re.match(r"([A-Za-z0-9_.-]+)>=([0-9.]+)", line) for line in told]
    return [f"{one[1]}=={one[2]}.*" for one in pairs if one is not None and one[1] != "torch"]


def _name(line: str) -> str:
    return re.sub(r"[-_.]+", "-", line.partition("==")[0]).lower()


def _serve(program: Path, work: Path) -> None:
    with running(work / "server.log", DEMO, program, BARE, work, READY_S) as server:
        _chat(server)
        _page(server)
        surprises = server.surprises()
        status = server.stop()
    assert not surprises, f"in the server's log: {surprises[:5]}"
    assert status == 0, f"the server stopped with status {status}"


def _chat(server: Running) -> None:
    asked = {"messages": [{"role": "user", "content": QUESTION}], "max_tokens": 64, "seed": 1}
    reply: dict[str, Any] = json.loads(_ask(server.url + "/v1/chat/completions", json.dumps(asked).encode()))
    timings = reply["timings"]
    sys.stdout.write(f"            reply: {reply['choices'][0]['message']['content']!r}\n")
    sys.stdout.write(f"            drafted {timings['draft_n']}, accepted {timings['draft_n_accepted']}\n")
    assert reply["choices"][0]["message"]["content"], "the reply is empty"
    assert timings["draft_n"] > 0, "nothing was drafted"


def _page(server: Running) -> None:
    """The files that were installed are the repository's."""
    for address, (name, _) in FILES.items():
        assert _ask(server.url + address) == (ROOT / "webui" / name).read_bytes(), (
            f"{address} is not webui/{name}"
        )


def _ask(address: str, body: bytes | None = None) -> bytes:
    request = urllib.request.Request(address, body, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as answer:
        return bytes(answer.read())


def _timed(what: str, work: Callable[[], T]) -> T:
    started = time.monotonic()
    made = work()
    sys.stdout.write(f"{time.monotonic() - started:7.1f} s  {what}\n")
    sys.stdout.flush()
    return made


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
