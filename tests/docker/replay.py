"""Follows docker/Dockerfile without docker: the same steps in a clean environment, then the image's life.

    python -m tests.docker.replay [--keep DIR] [--build-arg NAME=VALUE …]

Every step comes from the file itself. Absolute folders are made under a temporary one; the Python that runs this
stands in for the base image's. What only root of a container can do (`useradd`) is left out, and said. Then, with
nothing in the environment but the image's: start, health check until it passes, a request, the stop signal. As root
the server runs as the image's user. Exit status 0 if all went as it would in a container.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tests.docker.dockerfile import Stage, Step, filled, read

ROOT = Path(__file__).parents[2]
STEP_S, READY_S, STOP_S = 1800, 180, 60
LEFT_OUT = ("useradd",)  # needs a system of its own
TOOL = {
    "type": "function",
    "function": {
        "name": "look",
        "parameters": {
            "type": "object",
            "properties": {"name": {"type": "string", "maxLength": 8}},
            "required": ["name"],
            "additionalProperties": False,
        },
    },
}


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


class Replay:
    """A file system of a stage below `root`, and the environment its steps see."""

    def __init__(self, root: Path, tools: Path, arguments: dict[str, str]) -> None:
        self.root = root
        self.tools = tools
        self.given = arguments
        self.built: dict[str, Path] = {}

    def stage(self, stage: Stage) -> None:
        """Run the steps of a stage. Raises CalledProcessError where one fails."""
        self.root.mkdir()
        self.tops = sorted({"opt", *(self._top(step) for step in stage.steps if self._top(step))})
        self.folder = self.root
        self.env = {
            "PATH": f"{self.tools}:/usr/bin:/bin",
            "HOME": str(self.root / "root"),
            "LC_ALL": "C.UTF-8",
        }
        for name in ("PIP_CONFIG_FILE", "PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS"):
            if name in os.environ:
                self.env[name] = os.environ[name]  # where this machine's packages come from
        self.values: dict[str, str] = {}
        for step in stage.steps:
            started = time.monotonic()
            getattr(self, f"_{step.word.lower()}", self._told)(step)
            say(f"{time.monotonic() - started:7.1f} s  {step.word} {step.rest[:90]}")

    def keep(self, name: str) -> None:
        """Put a finished stage aside. The next one gets the same place: environments do not move."""
        self.built[name] = self.root.with_name(f"stage-{name}")
        self.root.rename(self.built[name])

    def here(self, text: str) -> str:
        """Absolute folders of the image as folders below `root`."""
        return re.sub(rf"(?<![\w/.-])/({'|'.join(self.tops)})\b", rf"{self.root}/\1", text)

    @staticmethod
    def _top(step: Step) -> str:
        if step.word not in ("WORKDIR", "VOLUME", "COPY"):
            return ""
        last = step.arguments[-1]
        return last.split("/")[1] if last.startswith("/") else ""

    def _arg(self, step: Step) -> None:
        self.values |= {name: self.given.get(name, value) for name, value in step.pairs.items()}

    def _env(self, step: Step) -> None:
        self.env |= {name: self.here(filled(value, self.env)) for name, value in step.pairs.items()}

    def _workdir(self, step: Step) -> None:
        self.folder = Path(self.here(step.rest))
        self.folder.mkdir(parents=True, exist_ok=True)

    def _copy(self, step: Step) -> None:
        *sources, target = step.arguments
        source_root = self.built[step.flags["from"]] if "from" in step.flags else ROOT
        goal = self.folder / self.here(target)
        for source in sources:
            found = source_root / source.lstrip("/")
            if not found.is_dir():
                into = goal / found.name if target.endswith("/") else goal
                into.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(found, into)
                continue
            ignored = shutil.ignore_patterns("__pycache__", "node_modules") if source_root == ROOT else None
            shutil.copytree(found, goal, symlinks=True, ignore=ignored, dirs_exist_ok=True)

    def _run(self, step: Step) -> None:
        line = self.here(step.rest)
        for word in LEFT_OUT:
            if re.search(rf"\b{word}\b", line):
                say(f"   left out  {word}")
        if os.geteuid() != 0:
            line = re.sub(r"\bchown\b", "true", line)
        done = subprocess.run(
            ["/bin/sh", "-e", "-c", line],
            cwd=self.folder,
            env={**self.values, **self.env},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=STEP_S,
            check=False,
        )
        if done.returncode:
            say(done.stdout[-4000:])
            raise subprocess.CalledProcessError(done.returncode, step.rest)

    def _told(self, step: Step) -> None:
        """Instructions that only describe the image; `live` reads those that matter."""

    def live(self, stage: Stage, *, as_user: bool) -> None:
        """Start the image's command, check its health, ask it once, stop it. Raises AssertionError."""
        port = _free_port()
        env = {**self.env, "SLIPSTREAM_PORT": str(port)}
        user = int(stage.last("USER").rest.partition(":")[0])
        how: dict[str, Any] = {"cwd": self.folder, "env": env}
        if as_user:
            how |= {"user": user, "group": user, "extra_groups": []}
        program = [self._found(stage.last("ENTRYPOINT").arguments[0]), *stage.last("CMD").arguments]
        _, _, check_line = stage.last("HEALTHCHECK").rest.partition("CMD ")
        check = json.loads(check_line)
        check[0] = self._found(check[0])

        def healthy() -> bool:
            return subprocess.run(check, **how, capture_output=True, timeout=30, check=False).returncode == 0

        assert not healthy(), "the health check passes without a server"
        log = self.root.with_name("server.log")
        with log.open("wb") as file, subprocess.Popen(program, **how, stdout=file, stderr=file) as server:
            try:
                self._serve(server, healthy, port, getattr(signal, stage.last("STOPSIGNAL").rest))
            except AssertionError:
                say(log.read_text(errors="replace")[-4000:])
                raise
            finally:
                server.kill()
        assert not healthy(), "the health check passes after the end"
        if as_user:
            self._check_owner(user, Path(self.here(stage.last("VOLUME").rest)))

    @staticmethod
    def _serve(server: subprocess.Popen[bytes], healthy: Callable[[], bool], port: int, stop: int) -> None:
        """From start to stop. Raises AssertionError."""
        started = time.monotonic()
        while not healthy():
            assert server.poll() is None, "the server has ended"
            assert time.monotonic() - started < READY_S, "not healthy in time"
            time.sleep(0.5)
        say(f"{time.monotonic() - started:7.1f} s  healthy")
        _talk(port)
        asked = time.monotonic()
        server.send_signal(stop)
        status = server.wait(STOP_S)
        say(f"{time.monotonic() - asked:7.1f} s  stopped with status {status}")
        assert status == 0, "not stopped in order"

    def _check_owner(self, user: int, volume: Path) -> None:
        """Raises AssertionError if the server's user owns anything outside its volume."""
        owned = [path for path in self.root.rglob("*") if path.lstat().st_uid == user]
        outside = [path for path in owned if path != volume and volume not in path.parents]
        assert not outside, f"written outside the volume: {outside[:5]}"

    def _found(self, name: str) -> str:
        found = shutil.which(name, path=self.env["PATH"])
        assert found, f"{name} is not in the image's PATH"
        return found


def _talk(port: int) -> None:
    """A plain reply, and a forced tool call: it needs what an image may lack while plain text works."""
    say(f"            reply: {_ask(port)['content']!r}")
    (call,) = _ask(port, tools=[TOOL], tool_choice="required", max_tokens=200)["tool_calls"]
    say(f"            call:  {call['function']}")
    assert set(json.loads(call["function"]["arguments"])) == {"name"}


def _ask(port: int, **fields: Any) -> dict[str, Any]:
    """The message of the reply."""
    asked = [{"role": "user", "content": "Write the docstring:\n\ndef f(x): ..."}]
    body = {"messages": asked, "max_tokens": 8, "parallel_tool_calls": False, **fields}
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/chat/completions",
        json.dumps(body).encode(),
        {"content-type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        return dict(json.load(answer)["choices"][0]["message"])


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as one:
        return int(one.getsockname()[1])


def _base_python() -> tuple[Path, bool]:
    """The Python that stands in for the base image's, and whether the image's user can run it."""
    own = Path(sys.base_prefix) / "bin" / f"python{sys.version_info.major}.{sys.version_info.minor}"
    for python in (own, Path("/usr/bin") / own.name):
        real = python.resolve()
        if python.exists() and all(one.stat().st_mode & stat.S_IXOTH for one in (real, *real.parents)):
            return python, os.geteuid() == 0
    return own, False


def _make_tools(folder: Path, python: Path) -> None:
    """What the base image has: `python` and `pip`; and stand-ins for what is left out."""
    folder.mkdir()
    (folder / "python").symlink_to(python)
    for word in LEFT_OUT:
        stand_in = folder / word
        stand_in.write_text("#!/bin/sh\n")
        stand_in.chmod(stand_in.stat().st_mode | stat.S_IXUSR)


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--keep", type=Path, help="folder to work in, left behind afterwards")
    parser.add_argument("--build-arg", action="append", default=[], metavar="NAME=VALUE")
    options = parser.parse_args(arguments)
    work = options.keep or Path(tempfile.mkdtemp(prefix="slipstream-image-"))
    work.mkdir(exist_ok=True)
    work.chmod(0o755)
    started = time.monotonic()
    try:
        python, as_user = _base_python()
        say(
            f"Python: {python}; the server runs as {'the user of the image' if as_user else 'whoever runs this'}"
        )
        _make_tools(work / "tools", python)
        given = dict(one.partition("=")[::2] for one in options.build_arg)
        replay = Replay(work / "root", work / "tools", given)
        *builds, final = read(ROOT / "docker" / "Dockerfile")
        for stage in builds:
            say(f"stage {stage.name} from {stage.base}")
            replay.stage(stage)
            replay.keep(stage.name)
        say(f"the image, from {final.base}")
        replay.stage(final)
        replay.live(final, as_user=as_user)
    except (subprocess.SubprocessError, AssertionError, OSError) as error:
        say(f"failed: {error}")
        return 1
    finally:
        if options.keep is None:
            shutil.rmtree(work, ignore_errors=True)
    say(f"{time.monotonic() - started:7.1f} s in all")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
