"""`slipstream plan`: the same figures as the server that then starts, a table, and refusals by name."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import pytest

from slipstream.engine.core import forward
from slipstream.engine.service.start.launch import launch
from slipstream.engine.settings import Settings
from slipstream.server.command.cli import dispatch
from slipstream.server.command.forecast_table import GPUS, memory_of, table
from tests.checkpoints import tiny_checkpoint
from tests.head_checkpoints import add_tensors, mtp_deepseek
from tests.process import ROOT
from tests.public_configs import CONFIGS
from tests.service.test_engine_contract import DEMO

TARGET, DRAFT = str(DEMO / "target"), str(DEMO / "draft")
CONFIG = f"{TARGET}/config.json"


def planned(capsys: pytest.CaptureFixture[str], *arguments: str, **environ: str) -> dict[str, Any]:
    assert dispatch(["plan", "--json", *arguments], environ) == 0
    told: dict[str, Any] = json.loads(capsys.readouterr().out)
    return told


def compare(told: dict[str, Any], settings: Settings) -> None:
    """The plan against the server: what it reports of itself, and the tensors that it holds."""
    running = launch(settings)
    try:
        info, engine = running.info, running._engine
        target = told["networks"]["target"]
        assert (target["n_params"], target["weight_bytes"]) == (info.n_params, info.weight_bytes)
        assert (target["architecture"], target["dtype"]) == (info.architecture, info.dtype)
        assert (told["n_ctx"], told["n_ctx_train"]) == (info.n_ctx, info.n_ctx_train)
        assert (told["n_pages"], told["page_size"]) == (info.n_pages, info.page_size)
        assert told["n_slots"] == info.n_slots
        assert tuple(told["drafters"]) == info.drafters
        assert list(told["networks"]) == list(engine._cache.stores)
        for name, store in engine._cache.stores.items():
            assert told["networks"][name]["token_bytes"] == store.token_bytes
            assert told["networks"][name]["slot_bytes"] == store.slot_bytes
        ropes = engine.target.network.decoder.ropes.values()
        n_table_bytes = sum(rope.cos.nbytes + rope.sin.nbytes for rope in ropes)
        if list(told["networks"]) == [forward.STORE]:
            assert told["taken"]["tables"] == n_table_bytes
    finally:
        asyncio.run(running.close())


@pytest.mark.sampled(keep=3)
@pytest.mark.parametrize(
    "more",
    [
        {},
        {"model_draft": DRAFT},
        {"model_draft": DRAFT, "parallel": 2, "ctx_size": 700, "draft_max": 5, "dtype": "float32"},
        {"model_draft": DRAFT, "draft_max": 0},
        {"cache_size": 32, "spec_type": "none"},
        {"model_draft": DRAFT, "kv_cache_dtype": "fp8"},
    ],
)
def test_a_plan_is_what_the_server_reports(capsys: pytest.CaptureFixture[str], more: dict[str, Any]) -> None:
    flags = [word for name, value in more.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    told = planned(capsys, "-m", TARGET, *flags)
    compare(told, Settings(model=TARGET, threads=1, **more))


def test_an_mtp_layer_in_the_files_and_recurrent_layers(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """No config here speaks of the layer; where the files are there, they do."""
    shape = {"intermediate_size": 96, "head_dim": 16}
    folder = tiny_checkpoint("qwen3", tmp_path / "a", changes=shape)
    assert list(planned(capsys, "-m", str(folder))["networks"]) == ["target"]
    add_tensors(folder, mtp_deepseek("model.layers.4.", 1, head_norms=True))
    told = planned(capsys, "-m", str(folder), "-np", "2")
    assert list(told["networks"]) == ["target", "draft-mtp"]
    compare(told, Settings(model=str(folder), threads=1, parallel=2))
    hybrid = str(tiny_checkpoint("qwen3_5", tmp_path / "b"))
    told = planned(capsys, "-m", hybrid, "-c", "128", "--draft-max", "3")
    assert told["taken"]["parked"] > 0
    compare(told, Settings(model=hybrid, threads=1, ctx_size=128, draft_max=3))


def test_settings_from_everywhere(capsys: pytest.CaptureFixture[str]) -> None:
    told = planned(capsys, "--config", CONFIG, SLIPSTREAM_PARALLEL="3", SLIPSTREAM_PORT="1")
    assert (told["n_slots"], told["memory_bytes"]) == (3, None)
    told = planned(capsys, "-c", "300", SLIPSTREAM_MODEL=TARGET, SLIPSTREAM_CTX_SIZE="600")
    assert told["n_ctx"] == 300
    told = planned(capsys, "-m", TARGET, "--draft-config", f"{DRAFT}/config.json", "--memory", "24")
    assert list(told["networks"]) == ["target", "draft"]
    assert told["memory_bytes"] == 24 * 2**30


def test_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert dispatch(["plan", "-m", TARGET, "-md", DRAFT, "--memory", "4090", "-c", "2048"], {}) == 0
    text = capsys.readouterr().out
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert lines[1].startswith("target bfloat16 5.2 M 11.98 MiB 5.00 KiB")
    assert lines[2].startswith("draft bfloat16 1.0 M 2.85 MiB 1.00 KiB")
    assert "weights 14.82 MiB" in lines
    assert "pages 102.00 MiB 272 of 64 tokens, 384.00 KiB each" in lines
    assert "spare page 384.00 KiB for padding of captured passes" in lines
    assert "total 118.70 MiB of 23.00 GiB (--memory)" in lines
    assert "Fits: 8 × 2048 tokens (34 pages each) can be cached at once." in lines
    assert "recurrent states" not in text
    assert text.endswith("there are 8192 positions.\n")


def test_the_page_shows_what_it_prints(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = (ROOT / "docs" / "operations.md").read_text()
    shown = re.search(r"^\$ slipstream (plan --config )(\S+)(.*)\n((?s:.*?))```", page, flags=re.MULTILINE)
    assert shown is not None
    command, _, options, output = shown.groups()
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIGS["Qwen3.5-27B"]))
    assert dispatch([*command.split(), str(path), *options.split()], {}) == 0
    assert capsys.readouterr().out == output


def test_what_does_not_fit_is_a_status(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["-m", TARGET, "--memory", "0.005"]
    assert dispatch(["plan", *arguments], {}) == 3
    assert "Does not fit: without pages it takes" in capsys.readouterr().out
    assert dispatch(["plan", *arguments, "--json"], {}) == 3
    told = json.loads(capsys.readouterr().out)
    assert told["refusal"].startswith("without pages")
    assert "recurrent states" in table({**told, "taken": {**told["taken"], "states": 1}})


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["-m", "./nowhere"], "./nowhere: no such folder"),
        (["-m", str(DEMO / "eagle3")], "LlamaForCausalLMEagle3 is not supported"),
        (["-m", TARGET, "-md", str(DEMO / "mtp")], "is a draft-mtp; of draft networks given apart"),
        (["-m", TARGET, "-c", "9000"], "--ctx-size 9000: is more than the 8192 positions"),
        (["-m", TARGET, "--spec-type", "draft-mtp"], "draft-mtp needs a network of its kind"),
    ],
)
def test_what_cannot_be_planned(capsys: pytest.CaptureFixture[str], arguments: list[str], told: str) -> None:
    assert dispatch(["plan", *arguments], {}) == 3
    captured = capsys.readouterr()
    assert told in captured.err
    assert captured.out == ""


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ([], "--model is needed"),
        (
            ["-m", TARGET, "--memory", "lots"],
            "argument --memory: lots: must be a number of GiB or one of H200, H100",
        ),
        (["-m", TARGET, "--memory", "0"], "argument --memory: 0: must be"),
        (["-m", TARGET, "--config", CONFIG], "--model and --config: give one of them"),
        (["-m", TARGET, "-md", "x", "--draft-config", CONFIG], "--model-draft and --draft-config"),
        (["--config", "nowhere/config.json"], "argument --config: nowhere/config.json: no such file"),
        (["-m", TARGET, "--draft-config", "y.json"], "argument --draft-config: y.json: no such file"),
        (["-m", TARGET, "--port", "1"], "unrecognized arguments: --port"),
        (["-m", TARGET, "-np", "0"], "--parallel 0: must be at least 1"),
    ],
)
def test_bad_usage(capsys: pytest.CaptureFixture[str], arguments: list[str], told: str) -> None:
    with pytest.raises(SystemExit) as caught:
        dispatch(["plan", *arguments], {})
    assert caught.value.code == 2
    assert told in capsys.readouterr().err


def test_gpus_by_name() -> None:
    for text in ("H200", "h200", "RTX 4090", "rtx-4090", "4090", "A100-80", "a100 80", "H100-80GB"):
        assert 20 * 2**30 < memory_of(text) < 140 * 2**30
    assert memory_of("RTX 4090") == memory_of("4090") == int(GPUS["4090"] * 2**30)
    assert memory_of("1.5") == 3 * 2**29
    for text in ("", "-1", "nan", "1e3", "24GB", "H300"):
        with pytest.raises(ValueError, match="must be a number of GiB"):
            memory_of(text)
