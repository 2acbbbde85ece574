"""Flags that cannot take effect are refused at start, with the reason."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from slipstream.engine.api import Chat, Request, Sampling
from slipstream.engine.errors import LoadError, SettingError
from slipstream.engine.frames import frame_sizes
from slipstream.engine.models.reading.config import read_config
from slipstream.engine.service.start import capture
from slipstream.engine.service.start.drafters import drafter_types
from slipstream.engine.service.start.launch import _target_checkpoint, launch
from slipstream.engine.service.start.sizes import Checkpoint, Memory, context
from slipstream.engine.settings import Settings
from tests.checkpoints import tiny_checkpoint
from tests.recording import record
from tests.service.told import emitted, events_of

ROOT = Path(__file__).parents[2]

DEMO = Path(__file__).parents[2] / "demo"
TARGET, DRAFT = str(DEMO / "target"), str(DEMO / "draft")


@pytest.mark.parametrize(
    ("spec_type", "draft", "expected"),
    [
        ("auto", None, ("forced", "prediction", "suffix")),
        ("auto", DRAFT, ("forced", "prediction", "suffix", "draft-model")),
        ("auto,ngram-map-k", None, ("forced", "prediction", "ngram-map-k", "suffix")),
        ("draft-simple", DRAFT, ("forced", "prediction", "draft-model")),
        ("draft-model, ngram-simple", DRAFT, ("forced", "prediction", "ngram-simple", "draft-model")),
        ("prediction", None, ("forced", "prediction")),
        ("none", None, ()),
    ],
)
def test_types(spec_type: str, draft: str | None, expected: tuple[str, ...]) -> None:
    settings = Settings(model=TARGET, spec_type=spec_type, model_draft=draft)
    assert drafter_types(settings, None if draft is None else "draft-model") == expected


@pytest.mark.parametrize(("draft", "network"), [(DRAFT, "draft-model"), (None, "draft-mtp")])
def test_a_network_that_no_request_may_use_is_not_loaded(
    draft: str | None, network: str, caplog: pytest.LogCaptureFixture
) -> None:
    settings = Settings(model=TARGET, model_draft=draft, draft_max=0)
    assert drafter_types(settings, network) == ("forced", "prediction", "suffix")
    told = ["not loaded, as nothing is drafted (--draft-max 0): --model-draft"]
    assert caplog.messages == (told if draft else [])
    assert network in drafter_types(replace(settings, draft_max=1), network)


def test_more_threads_than_cores_are_told(caplog: pytest.LogCaptureFixture) -> None:
    """Before anything is loaded: the start takes as many times longer, too."""
    n, n_cores = torch.get_num_threads(), len(os.sched_getaffinity(0))
    try:
        for n_threads in (n_cores, n_cores + 1):
            with pytest.raises(LoadError):
                launch(Settings(model="./no/such", threads=n_threads))
    finally:
        torch.set_num_threads(n)
    assert [one for one in caplog.messages if "--threads" in one] == [
        f"--threads {n_cores + 1} is more than the cores here, {n_cores}: passes may be many times slower"
    ]


def test_limits_of_drafts_beside_no_drafter_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    drafting = Settings(model=TARGET, draft_max=8, draft_min=2)
    drafter_types(drafting, None)
    drafter_types(Settings(model=TARGET, spec_type="none"), None)
    assert caplog.messages == []
    drafter_types(replace(drafting, spec_type="none"), None)
    assert caplog.messages == [
        "without effect, as nothing is drafted (--spec-type): --draft-max, --draft-min"
    ]


@pytest.mark.parametrize("dtype", ["auto", "float16"])
def test_float16_on_a_cpu_is_logged_as_inexact(dtype: str, caplog: pytest.LogCaptureFixture) -> None:
    _target_checkpoint(Settings(model=TARGET, device="cpu", dtype=dtype))
    assert ("text may depend on drafts" in caplog.text) == (dtype == "float16")


@pytest.mark.parametrize(
    "network", ["draft-model", "draft-eagle3", "draft-mtp", "draft-dflash", "draft-dspark"]
)
def test_the_network_that_is_there_is_used(network: str) -> None:
    settings = Settings(model=TARGET, model_draft=DRAFT)
    assert drafter_types(settings, network) == ("forced", "prediction", "suffix", network)
    other = "draft-mtp" if network != "draft-mtp" else "draft-model"
    with pytest.raises(SettingError, match=f"what was given is a {network}"):
        drafter_types(replace(settings, spec_type=other), network)


@pytest.mark.parametrize(("network", "expected"), [(None, "synthetic"), ("draft-mtp", "draft-mtp")])
def test_acceptance_at_random_wants_a_full_draft_in_every_pass(network: str | None, expected: str) -> None:
    for synthetic in (Settings(spec_synth_len=2.0), Settings(spec_synth_rates="0.5")):
        assert drafter_types(synthetic, network) == ("forced", "prediction", expected)
        listed = replace(synthetic, spec_type="suffix")
        assert drafter_types(listed, None) == ("forced", "prediction", "suffix")


def test_the_targets_own_layers_need_no_flag() -> None:
    assert drafter_types(Settings(model=TARGET), "draft-mtp") == (
        "forced",
        "prediction",
        "suffix",
        "draft-mtp",
    )
    assert drafter_types(Settings(model=TARGET, spec_type="suffix"), "draft-mtp") == (
        "forced",
        "prediction",
        "suffix",
    )


@pytest.mark.parametrize(
    ("changes", "setting"),
    [
        ({"spec_type": "warp"}, "spec_type"),
        ({"spec_type": "draft-model"}, "spec_type"),
        ({"spec_type": "ngram-simple", "model_draft": DRAFT}, "model_draft"),
        ({"spec_type": "none", "model_draft": DRAFT}, "model_draft"),
        ({"draft_min": 17}, "draft_min"),
        ({"device_draft": "cpu"}, "device_draft"),
        ({"draft_taps": "1,2,3"}, "draft_taps"),
        ({"model_draft": DRAFT, "draft_taps": "1,2,3"}, "draft_taps"),
        ({"draft_p_min": 0.5}, "draft_p_min"),
        ({"spec_type": "none", "spec_ngram_simple_size_n": 4}, "spec_ngram_simple_size_n"),
        ({"spec_type": "ngram-map-k", "spec_ngram_map_k4v_min_hits": 2}, "spec_ngram_map_k4v_min_hits"),
        ({"spec_type": "suffix", "spec_ngram_mod_n_min": 2}, "spec_ngram_mod_n_min"),
        ({"spec_type": "suffix", "lookup_cache_static": "x"}, "lookup_cache_static"),
        (
            {"spec_type": "draft-model", "model_draft": DRAFT, "spec_shared_history": "all"},
            "spec_shared_history",
        ),
        ({"spec_shared_history_size": 2048}, "spec_shared_history_size"),
        ({"spec_type": "synthetic"}, "spec_type"),
        ({"spec_synth_len": 40.0}, "spec_synth_len"),
        ({"spec_type": "none", "spec_synth_rates": "0.5"}, "spec_synth_rates"),
        ({"device": "tpu"}, "device"),
        ({"device": "cuda:99"}, "device"),
        ({"ctx_size": 10**7}, "ctx_size"),
        ({"parallel": 128, "batch_size": 64}, "parallel"),
        ({"cache_size": 1}, "cache_size"),
        ({"draft_max": 65}, "draft_max"),
        ({"exact": True, "dtype": "float16"}, "exact"),
    ],
)
def test_a_flag_without_effect_is_refused(changes: dict[str, object], setting: str) -> None:
    with pytest.raises(SettingError) as caught:
        launch(replace(Settings(model=TARGET), **changes))
    assert caught.value.setting == setting
    assert f"--{setting.replace('_', '-')}" in str(caught.value)


@pytest.mark.parametrize("name", ["", "/nowhere/at/all", "./nowhere", "a/b/c", "nobody/nothing"])
def test_a_model_that_is_not_there_is_refused(name: str) -> None:
    with pytest.raises(LoadError):
        launch(Settings(model=name))


def test_the_context_is_what_fits_the_cache_unless_it_is_set() -> None:
    path = Path(TARGET)
    source = Checkpoint(path, read_config(path), torch.device("cpu"), torch.bfloat16)
    memory = Memory.of(source.device)
    small = context(Settings(model=TARGET, cache_size=4), [source], memory)
    assert (
        512
        <= small
        < context(Settings(model=TARGET, cache_size=4000), [source], memory)
        == source.config.n_ctx_train
    )
    assert small * source.demand(Settings()).token_bytes <= 4 * 2**20
    assert context(Settings(model=TARGET, cache_size=4, ctx_size=2048), [source], memory) == 2048


async def test_a_draft_model_of_fewer_positions_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    draft = tmp_path / "short"
    shutil.copytree(DRAFT, draft)
    config = json.loads((draft / "config.json").read_text())
    (draft / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 2048}))
    settings = Settings(model=TARGET, model_draft=str(draft), parallel=1)
    engine = launch(settings)
    await engine.close()
    assert engine.info.n_ctx == 2048
    assert "the draft model has no more positions" in caplog.text
    with pytest.raises(SettingError, match=re.escape(f"4096: is more than the 2048 positions of {draft}")):
        launch(replace(settings, ctx_size=4096))


async def test_memory_of_states_is_told_and_a_size_without_use_refused(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    hybrid = tiny_checkpoint("qwen3_5", tmp_path / "hybrid")
    base = Settings(model=str(hybrid), ctx_size=256, parallel=2, draft_max=3)
    with caplog.at_level("INFO", logger="slipstream.engine.service.start.sizes"):
        await launch(replace(base, cache_ram=1)).close()
    # Three layers: 4 heads of 16 x 16 in float32 and three inputs of 128 channels; a row's record beside its input.
    state, row = 3 * (4 * 16 * 16 * 4 + 3 * 128 * 4), 3 * ((2 * 16 + 4 * 17) * 4 + 128 * 4)
    assert f"slot_bytes={state} parked_row_bytes={row} n_parked=6" in caplog.text
    dense = tiny_checkpoint("qwen3", tmp_path / "dense")
    with pytest.raises(SettingError, match=r"cache.ram.*no use"):
        launch(replace(base, model=str(dense), cache_ram=1))


def fails(work: Callable[[], None]) -> Callable[[], None]:
    raise RuntimeError("operation not permitted when stream is capturing")


@pytest.mark.parametrize("works", [True, False])
def test_passes_are_captured_where_that_works(
    works: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As on CUDA, with a tape for graphs."""
    found = record if works else fails, frame_sizes(2, 3, 64)
    monkeypatch.setattr(capture, "way", lambda *args, are_divided: found)
    settings = Settings(model=TARGET, model_draft=DRAFT, parallel=2, ctx_size=256, draft_max=3)
    with caplog.at_level("INFO"):
        served = launch(settings)
    engine = served._engine
    target = engine._cache.stores["target"]
    asyncio.run(served.close())
    assert ("captured sizes=" in caplog.text) == works
    assert ("--no-capture-passes" in caplog.text) != works
    assert bool(target.frames.frames) == works
    if works:
        assert {one.size for one in target.frames.frames} == set(frame_sizes(2, 3, 64))
        assert engine.target.network.captured is not None


async def test_ranks_capture_their_passes_together_or_the_server_does_not_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The other ranks may have captured what this one has not, so there is no going on without graphs."""
    settings = Settings(model=TARGET, parallel=2, ctx_size=256, tensor_parallel_size=2, threads=2)
    served = launch(settings)  # on CPUs ranks capture nothing
    engine, processes = served._engine, served._processes
    assert engine.target.network.captured is None
    monkeypatch.setattr(capture, "way", lambda *args, are_divided: (fails, frame_sizes(2, 3, 64)))
    with pytest.raises(
        LoadError, match=r"captured on all ranks; --no-capture-passes .*: operation not permitted"
    ):
        capture.capture_passes(engine, settings, 3, processes)
    assert all(one.process.poll() is not None for one in processes._children)
    await served.close()


def test_a_start_on_the_cpu_loads_nothing_for_gpus_and_no_web_framework() -> None:
    """torch imports its own, and Triton with it, for some operations on tensors without memory; that takes a second."""
    code = (
        "import asyncio, sys\n"
        "from slipstream.engine.core import engine\n"
        "from slipstream.engine.service.start.launch import launch\n"
        "from slipstream.engine.settings import Settings\n"
        "from tests.soon_ready import shortly\n"
        "engine.warm_up = shortly\n"
        "asyncio.run(launch(Settings(model='demo/target', model_draft='demo/draft', parallel=1)).close())\n"
        "needless = {'triton', 'torch._dynamo', 'transformers', 'pydantic', 'fastapi', 'starlette', 'uvicorn'}\n"
        "ours = {one for one in sys.modules if one.startswith('slipstream.kernels.')}\n"
        "print(*needless & set(sys.modules), *(one for one in ours if one.endswith(('.cuda', '.triton'))))"
    )
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (run.returncode, run.stdout.strip()) == (0, ""), run.stderr


def test_a_given_chat_template_replaces_the_models(tmp_path: Path) -> None:
    text = "{% for one in messages %}[{{ one.content }}]{% endfor %}"
    path = tmp_path / "own.jinja"
    path.write_text(text)
    for given in ({"chat_template": text}, {"chat_template_file": str(path)}):
        served = launch(Settings(model=TARGET, parallel=1, ctx_size=64, **given))
        assert (served.info.chat_template, served.info.tool_template) == (text, None)
        chat = Chat([{"role": "user", "content": "a"}], {"tools": [{"name": "look"}]})
        assert asyncio.run(served.render(chat)) == "[a]"
        asyncio.run(served.close())


def test_a_chat_template_that_is_none_ends_the_start_at_once(tmp_path: Path) -> None:
    empty, binary = tmp_path / "empty.jinja", tmp_path / "binary.jinja"
    empty.write_text(" \n")
    binary.write_bytes(b"\xff{{")
    for path, reason in ((empty, "is empty"), (binary, "cannot be read"), (tmp_path, "no such file")):
        with pytest.raises(SettingError, match=f"^--chat-template-file {path}: {reason}"):
            launch(Settings(model=TARGET, chat_template_file=str(path)))
    with pytest.raises(LoadError, match=r"^--chat-template: "):
        launch(Settings(model=TARGET, chat_template="{% for %}"))


def test_a_model_has_the_name_it_was_given_by(tmp_path: Path) -> None:
    link = tmp_path / "my-model"
    link.symlink_to(TARGET)
    served = launch(Settings(model=str(link), parallel=1, ctx_size=64, capture_passes=False))
    asyncio.run(served.close())
    assert (served.info.name, served.info.path) == ("my-model", str(link))


def test_given_penalties_are_the_defaults_of_requests() -> None:
    given = {"repeat_penalty": 1.25, "repeat_last_n": 8, "presence_penalty": 0.5, "frequency_penalty": -0.5}
    served = launch(Settings(model=TARGET, parallel=1, ctx_size=64, alias="a, b", **given))
    assert given.items() <= served.info.sampling_defaults.items()
    assert (served.info.name, served.info.n_embd) == ("a", 256)
    asyncio.run(served.close())


async def test_tokens_that_the_models_makers_ban_do_not_come_unless_they_are_asked_for(
    tmp_path: Path,
) -> None:
    ask = Request(id="a", prompt="def area(", sampling=Sampling(temperature=0.0), max_tokens=6)
    settings = Settings(model=str(tmp_path), parallel=1, ctx_size=64, capture_passes=False)
    for one in Path(TARGET).iterdir():
        (tmp_path / one.name).symlink_to(one)
    replies = []
    config = json.loads((tmp_path / "generation_config.json").read_text())
    for banned in (False, True):
        if banned:
            (tmp_path / "generation_config.json").unlink()
            listed = {**config, "suppress_tokens": [replies[0][1], 10**6]}  # the other is no token
            (tmp_path / "generation_config.json").write_text(json.dumps(listed))
        served = launch(settings)
        replies.append(emitted(await events_of(served, ask)))
        if banned:
            wanted = replace(ask, sampling=replace(ask.sampling, logit_bias=((replies[0][1], 0.0),)))
            replies.append(emitted(await events_of(served, wanted)))
        await served.close()
    plain, without, wanting = replies
    assert plain == wanting
    assert (without[0], plain[1] in without) == (plain[0], False)
