"""What the README and the pages for users tell people to type works as written, against a server on the demo pair."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.process import DEMO, ROOT, Running, forked

WRITTEN = "http://127.0.0.1:8080"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("server")
    with forked(folder / "log", (*DEMO, "--slot-save-path", str(folder))) as one:
        yield one


def blocks(page: str, language: str, word: str) -> list[str]:
    """The fenced blocks of a page that hold a word."""
    found = re.findall(
        rf"^```{language}\n(.*?)^```", (ROOT / page).read_text(), flags=re.DOTALL | re.MULTILINE
    )
    return [one for one in found if word in one]


def said(command: list[str], text: str, server: Running) -> str:
    """What the command prints, with the written address replaced by the server's."""
    text = text.replace(WRITTEN, server.url).replace("localhost:8080", server.url.removeprefix("http://"))
    run = subprocess.run([*command, text], capture_output=True, text=True, timeout=60, check=False)
    assert run.returncode == 0, run.stderr
    return run.stdout


def test_the_python_example_prints_a_reply_and_ends(server: Running) -> None:
    (code,) = blocks("README.md", "python", "OpenAI(")
    text = said([sys.executable, "-c"], code, server)
    assert text == (
        "def first(values, default):\n    if not values:\n        return default\n    return values[0]\n"
    )


@pytest.mark.parametrize("page", ["README.md", "docs/speculation.md"])
def test_the_curl_examples_get_a_reply(page: str, server: Running) -> None:
    (command,) = blocks(page, "", "curl http")
    reply = json.loads(said(["bash", "-c"], command, server))
    assert (
        "def " in reply["choices"][0]["message"]["content"]
        or "return" in reply["choices"][0]["message"]["content"]
    )
    if "prediction" in command:
        assert reply["usage"]["completion_tokens_details"]["accepted_prediction_tokens"] > 10


def test_slots_are_saved_restored_and_erased_as_written(server: Running) -> None:
    said(["bash", "-c"], blocks("docs/speculation.md", "", "curl http")[0], server)
    (commands,) = blocks("docs/operations.md", "", "action=save")
    saved, restored, erased = (
        json.loads(said(["bash", "-c"], line, server)) for line in commands.splitlines()
    )
    assert saved["n_saved"] == restored["n_restored"]
    assert "n_erased" in erased


def test_the_flags_that_pages_name_exist() -> None:
    """No page speaks of a flag that a subcommand does not have."""
    from slipstream.server.command.subcommands import SUBCOMMANDS

    known = {flag for command in SUBCOMMANDS.values() for flag in command.flags}
    # Of programs that are not ours: make, docker, pip, tests' own.
    foreign = {"--model", "--check", "--build-arg", "--gpus", "--index-url"}
    for page in (
        "README.md",
        *(f"docs/{name}.md" for name in ("speculation", "chat", "operations", "models", "gpu")),
    ):
        named = set(re.findall(r"`(--[a-z][a-z-]+)", (ROOT / page).read_text()))
        assert named - known - foreign == set(), page
