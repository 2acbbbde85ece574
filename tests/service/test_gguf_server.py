"""A server started from GGUF files: the texts of one started from folders, and what it says if it cannot start."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from slipstream.engine.service.start.launch import launch
from slipstream.engine.settings import Settings
from slipstream.server.command.cli import dispatch
from slipstream.server.command.serve import run
from tests.checkpoints import noised_copy, tiny_checkpoint
from tests.gguf_files import gguf_of
from tests.http.serving import Served, served

QUESTION = [{"role": "user", "content": "What is the answer? 漢字"}]
SETTINGS: dict[str, Any] = {"ctx_size": 256, "parallel": 2, "threads": 1, "spec_adaptive": False}


@contextlib.contextmanager
def serving(model: Path, draft: Path | None = None, **changes: Any) -> Iterator[Served]:
    """A real engine behind HTTP."""
    settings = Settings(
        model=str(model), model_draft=None if draft is None else str(draft), **{**SETTINGS, **changes}
    )
    engine = launch(settings)
    try:
        with served(engine) as one:  # type: ignore[arg-type]
            yield one
    finally:
        asyncio.run(engine.close())


def answers(server: Served) -> list[tuple[str, int]]:
    """Texts and tokens of prompts, with sampling and without."""
    found = []
    for temperature in (0.0, 0.9):
        fields = {"messages": QUESTION, "max_tokens": 24, "temperature": temperature, "seed": 3}
        reply = server.post("/v1/chat/completions", {**fields, "ignore_eos": True}).json()
        found.append((reply["choices"][0]["message"]["content"], reply["usage"]["prompt_tokens"]))
    return found


def test_answers_are_those_from_the_folder(tmp_path: Path) -> None:
    folder = tiny_checkpoint("qwen3", tmp_path / "folder")
    contents = gguf_of(folder)
    model = contents.write(tmp_path / "Tiny-F32.gguf", most_tensors=30)
    draft = gguf_of(noised_copy(folder, tmp_path / "noised", 0.05)).as_type("Q8_0")
    with serving(folder) as server:
        expected = answers(server)
    with serving(model, draft.write(tmp_path / "draft.gguf")) as server:
        assert answers(server) == expected
        assert server.http.get("/v1/models").json()["data"][0]["id"] == "Tiny-F32"
        assert "draft-model" in server.engine.info.drafters
    assert expected[0][0] != expected[1][0]


def test_a_file_called_by_bytes_that_are_no_text(tmp_path: Path) -> None:
    model = gguf_of(tiny_checkpoint("qwen3", tmp_path / "folder")).write(tmp_path / "m\udcff.gguf")
    with serving(model) as server:
        assert len(answers(server)) == 2
        assert server.http.get("/v1/models/m\ufffd").json()["id"] == "m\ufffd"
        props = server.http.get("/props").json()
    assert props["model_path"] == f"{tmp_path}/m\ufffd.gguf"


def test_rounded_activations_change_the_arithmetic_and_no_text_by_drafts(tmp_path: Path) -> None:
    """Log-probabilities move a little; with drafts and without they are the same to the last bit."""
    folder = tiny_checkpoint("qwen3", tmp_path / "folder")
    model = gguf_of(folder).as_type("Q8_0").write(tmp_path / "model.gguf")
    draft = (
        gguf_of(noised_copy(folder, tmp_path / "noised", 0.05)).as_type("Q8_0").write(tmp_path / "draft.gguf")
    )
    fields = {"messages": QUESTION, "max_tokens": 24, "seed": 3, "logprobs": True, "ignore_eos": True}

    def answered(server: Served, **speculative: int) -> tuple[list[Any], str]:
        reply = server.post("/v1/chat/completions", {**fields, "speculative": speculative}).json()
        return reply["choices"][0]["logprobs"]["content"], reply["system_fingerprint"]

    with serving(model, draft, dtype="bfloat16") as server:
        exact, before = answered(server)
    with serving(model, draft, dtype="bfloat16", round_activations=True) as server:
        rounded, after = answered(server)
        assert answered(server, n_max=0)[0] == rounded
    assert before != after
    moved = abs(exact[0]["logprob"] - rounded[0]["logprob"])
    assert 0 < moved < 0.1


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"model": "nowhere/at/all/model.gguf"}, "nowhere/at/all/model.gguf: no such file"),
        ({"model": "model.gguf"}, "model.gguf: no such file"),
        ({"model": "demo/target", "model_draft": "./draft.gguf"}, "./draft.gguf: no such file"),
        (
            {"model": "demo/target", "round_activations": True},
            "--round-activations True: it would change nothing",
        ),
    ],
)
def test_what_cannot_be_is_said(
    flags: dict[str, Any], message: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert run(Settings(port=0, **flags), launch) == 3  # type: ignore[arg-type]
    assert message in caplog.text
    assert "Traceback" not in caplog.text


def test_files_that_are_damaged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    path = gguf_of(tiny_checkpoint("qwen2", tmp_path / "folder")).write(tmp_path / "model.gguf")
    assert dispatch(["plan", "-m", str(path), "--memory", "8"], {}) == 0
    path.write_bytes(path.read_bytes()[:-1])
    size = path.stat().st_size
    message = f"ends at byte {size + 1}, the file has {size}"
    assert run(Settings(model=str(path), port=0), launch) == 3
    assert f"{path}: damaged: truncated: tensor " in caplog.text
    assert message in caplog.text
    assert dispatch(["plan", "-m", str(path), "--memory", "8"], {}) == 3
    assert message in capsys.readouterr().err
