"""What a config says of memory: public models' figures, what stores really allocate, and the edge of what fits."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from slipstream.engine.cache.need import Sizes
from slipstream.engine.cache.store import Store
from slipstream.engine.errors import LoadError, SettingError, UnsupportedModel
from slipstream.engine.models.blueprint import META, draw, draw_mtp
from slipstream.engine.models.registry import read_model
from slipstream.engine.service.start.sizes import PAGE_SIZE, Demand, n_parked
from slipstream.engine.service.tools.forecast import Forecast, forecast
from slipstream.engine.settings import Settings
from slipstream.server.vision.opening import vision_bytes
from tests.checkpoints import tiny_checkpoint
from tests.public_configs import CONFIGS, COPIES, PARAMETERS, SILENT_MTP

KIB, MIB, GIB = 2**10, 2**20, 2**30
HYBRID = "Qwen3.5-27B"


@pytest.fixture
def written(tmp_path: Path) -> Callable[..., str]:
    """A public model's config, with changes, as a file alone."""

    def write(name: str, **changes: Any) -> str:
        path = tmp_path / f"{name}.json"
        path.write_text(json.dumps({**CONFIGS[name], **changes}))
        return str(path)

    return write


@pytest.fixture
def of(written: Callable[..., str]) -> Callable[..., Forecast]:
    """The forecast of a public model. memory: GiB."""

    def get(name: str, memory: float | None = None, **settings: Any) -> Forecast:
        given = None if memory is None else int(memory * GIB)
        return forecast(Settings(model=written(name), **settings), given)

    return get


@pytest.mark.sampled(keep=6)
@pytest.mark.parametrize("name", PARAMETERS)
def test_parameters_are_those_of_the_published_files(
    of: Callable[..., Forecast], written: Callable[..., str], name: str
) -> None:
    n_params = sum(one.n_params for one in of(name).networks.values())
    if name in SILENT_MTP:
        n_params += draw_mtp(read_model(written(name)), torch.bfloat16, SILENT_MTP[name]).n_params
    assert n_params == PARAMETERS[name] - COPIES.get(name, 0)


@pytest.mark.parametrize(
    ("name", "billions"), [("Qwen3.5-27B", 26.9), ("Qwen3.5-35B-A3B", 34.66), ("Qwen3.5-0.8B", 0.752)]
)
def test_text_models_within_wrappers(of: Callable[..., Forecast], name: str, billions: float) -> None:
    told = of(name).networks
    assert told["target"].n_params == pytest.approx(billions * 1e9, rel=1e-3)
    assert told["draft-mtp"].n_params < 0.03 * told["target"].n_params


@pytest.mark.parametrize(
    ("name", "same"),
    [
        ("Qwen2.5-VL-7B", "Qwen2.5-7B"),
        ("Qwen3-VL-8B", "Qwen3-8B"),
        ("Qwen3-VL-30B-A3B", "Qwen3-30B-A3B"),
    ],
)
def test_text_models_that_were_released_alone_too(of: Callable[..., Forecast], name: str, same: str) -> None:
    told, alone = of(name), of(same)
    assert told.networks["target"].n_params == alone.networks["target"].n_params == PARAMETERS[same]
    assert told.networks["target"].token_bytes == alone.networks["target"].token_bytes
    assert told.taken.tower == 0, "a config alone says nothing of the tensors"


TOWERS = [("qwen2_5_vl", "visual."), ("qwen3_vl", "model.visual."), ("mistral3", "vision_tower.")]


@pytest.mark.parametrize(("family", "prefix"), TOWERS)
def test_image_towers_are_counted(family: str, prefix: str, tmp_path: Path) -> None:
    folder = tiny_checkpoint(family, tmp_path, dtype=torch.bfloat16)
    tensors = load_file(folder / "model.safetensors")
    beside = (prefix, "multi_modal_projector.")
    n = sum(one.numel() for name, one in tensors.items() if name.startswith(beside))

    def told(memory: int | None = None, **settings: Any) -> Forecast:
        return forecast(Settings(model=str(folder), ctx_size=256, **settings), memory, vision_bytes)

    assert told().taken.tower == 2 * n > 0
    assert told(dtype="float32").taken.tower == 4 * n
    blind = told(vision=False)
    assert blind.taken.tower == 0
    assert told().total_bytes - blind.total_bytes == 2 * n
    assert told().networks["target"] == blind.networks["target"]
    enough = told().needed_one
    assert enough is not None
    assert told(enough).refusal is None
    assert told(enough - 2 * n).refusal is not None


@pytest.mark.parametrize(("name", "billions"), [("gpt-oss-20b", 20.91), ("gpt-oss-120b", 116.83)])
def test_gpt_oss(of: Callable[..., Forecast], name: str, billions: float) -> None:
    """Parameters as its model card counts them (arXiv 2508.10925, table 1); MXFP4 is widened to 16 bits."""
    told = of(name)
    target = told.networks["target"]
    assert round(target.n_params / 1e9, 2) == billions
    assert target.weight_bytes == pytest.approx(2 * target.n_params, rel=1e-5)
    n_layers = 24 if name == "gpt-oss-20b" else 36
    assert target.token_bytes == n_layers // 2 * 2 * 8 * 64 * 2  # of full layers; the others are windows
    assert told.taken.windows > 0


@pytest.mark.sampled(keep=6)
def test_mimo_v2_flash(of: Callable[..., Forecast]) -> None:
    """309 billion parameters, as its makers count them; value heads are narrower than key heads."""
    told, narrow = (of("MiMo-V2-Flash", kv_cache_dtype=kind) for kind in ("auto", "fp8"))
    target = told.networks["target"]
    assert round(target.n_params / 1e9) == 309
    assert target.token_bytes == 9 * 4 * (192 + 128) * 2  # of full layers; the others are windows
    assert narrow.networks["target"].token_bytes == target.token_bytes // 2
    assert told.taken.windows == 2 * narrow.taken.windows > 0


@pytest.mark.sampled(keep=6)
@pytest.mark.parametrize(
    ("name", "token_kib", "state_mib", "conv_mb"),
    [
        ("Llama-3.1-8B", 128, 0, 0),
        ("Qwen3-8B", 144, 0, 0),
        ("Qwen3.5-27B", 64, 144, 2.95),
        ("Qwen3-Next-80B-A3B", 24, 72, 1.77),
        ("Qwen3.5-35B-A3B", 20, 60, 1.47),
        ("Qwen3.5-0.8B", 12, 18, 0.66),
    ],
)
def test_cache_of_a_token_and_of_a_slot(
    of: Callable[..., Forecast], name: str, token_kib: int, state_mib: int, conv_mb: float
) -> None:
    told = of(name, dtype="bfloat16").networks["target"]
    assert told.token_bytes == token_kib * KIB
    assert (told.slot_bytes - state_mib * MIB) / 1e6 == pytest.approx(conv_mb, abs=0.005)
    wide = of(name, dtype="float32").networks["target"]
    assert wide.token_bytes == 2 * told.token_bytes
    assert wide.weight_bytes == pytest.approx(2 * told.weight_bytes, rel=1e-3)
    assert wide.slot_bytes - state_mib * MIB == 2 * (
        told.slot_bytes - state_mib * MIB
    )  # the state is float32


@pytest.mark.parametrize("name", ["Qwen3-0.6B", "Qwen3.5-0.8B", "Gemma-3-1B"])
def test_the_figures_are_what_stores_allocate(of: Callable[..., Forecast], written: Any, name: str) -> None:
    settings = Settings(parallel=3, draft_max=5, ctx_size=1000, spec_type="none")
    told = of(name, parallel=3, draft_max=5, ctx_size=1000, spec_type="none")
    config = read_model(written(name))
    demand = Demand(draw(config, config.dtype).needs, config.dtype)
    sizes = Sizes(
        n_slots=3,
        n_pages=told.n_pages,
        page_size=PAGE_SIZE,
        n_parked=n_parked(settings),
        n_window_pages=demand.n_window_pages(settings),
    )
    store = Store(demand.needs, sizes, config.dtype, META)
    held = sum(tensor.nbytes for layer in store.layers for tensor in tensors_of(layer))
    taken = told.taken
    assert held == taken.states + taken.parked + taken.windows + taken.spare + taken.pages
    assert (taken.states > 0, taken.windows > 0) == (name == "Qwen3.5-0.8B", name == "Gemma-3-1B")


def tensors_of(layer: Any) -> list[Tensor]:
    """All tensors in the fields of a dataclass and of those within it."""
    values = [getattr(layer, name) for name in layer.__dataclass_fields__]
    return [tensor for one in values for tensor in ([one] if isinstance(one, Tensor) else tensors_of(one))]


@pytest.mark.parametrize("name", ["Llama-3.2-1B", "Qwen3.5-0.8B", "Gemma-3-1B"])
def test_the_memory_that_is_needed_is_just_enough(written: Callable[..., str], name: str) -> None:
    settings = Settings(model=written(name), ctx_size=5000)
    free = forecast(settings)
    assert free.needed_one is not None
    assert free.needed_all is not None
    for needed, n in ((free.needed_one, 1), (free.needed_all, 4)):
        enough = forecast(settings, needed)
        assert enough.refusal is None
        assert enough.n_pages == n * free.pages_each
        assert enough.total_bytes < needed
        less = forecast(settings, needed - 64)
        assert less.n_pages == (0 if n == 1 else n * free.pages_each - 1)
        assert (less.refusal is None) == (n > 1)


@pytest.mark.parametrize("name", ["Llama-3.2-1B", "Qwen3.5-0.8B", "Gemma-3-1B"])
def test_the_longest_context_is_the_longest(written: Callable[..., str], name: str) -> None:
    settings = Settings(model=written(name))
    memory = int(3.5 * GIB)
    told = forecast(settings, memory)
    assert 0 < told.longest_all <= told.longest_one <= told.n_ctx_train
    at_most = forecast(replace(settings, ctx_size=told.longest_one), memory)
    assert at_most.refusal is None
    if told.longest_one < told.n_ctx_train:
        assert forecast(replace(settings, ctx_size=told.longest_one + 1), memory).refusal is not None
    both = forecast(replace(settings, ctx_size=told.longest_all), memory)
    assert both.n_pages >= 4 * both.pages_each


@pytest.mark.parametrize("memory", [2.0, 2.05, 2.25, 2.5, 3.0, 4.0])
def test_a_context_that_is_left_to_the_server_fits(of: Callable[..., Forecast], memory: float) -> None:
    """The rotary tables grow with the context, and with few bytes to a token they matter."""
    told = of("Qwen3.5-0.8B", memory, parallel=1)
    assert told.refusal is None
    assert told.n_pages >= told.pages_each
    assert told.n_ctx > 512


def test_a_head_that_the_config_does_not_call_tied_is_counted(written: Callable[..., str]) -> None:
    silent = written("Qwen3-8B", tie_word_embeddings=None)
    assert forecast(Settings(model=silent)).networks["target"].n_params == PARAMETERS["Qwen3-8B"]


def test_what_does_not_fit_says_why(of: Callable[..., Forecast]) -> None:
    large = of(HYBRID, 48)
    assert large.refusal is not None
    assert "there are 48.00 GiB" in large.refusal
    assert (large.n_pages, large.longest_one, large.n_ctx) == (0, 0, 32768)
    few = of(HYBRID, 53, ctx_size=100_000)
    assert few.refusal is not None
    assert "one sequence of --ctx-size 100000 needs" in few.refusal
    assert 0 < few.longest_one < 100_000
    much = of("Qwen3-0.6B", 8, cache_size=8000)
    assert much.refusal is not None
    assert "--cache-size 8000" in much.refusal
    assert of("Qwen3-0.6B", 8, cache_size=4000).taken.pages == pytest.approx(4000 * MIB, rel=0.01)


def test_drafts(of: Callable[..., Forecast], written: Callable[..., str]) -> None:
    own = of(HYBRID)
    assert own.drafters == ("forced", "prediction", "suffix", "draft-mtp")
    assert (
        own.networks["draft-mtp"].token_bytes == own.networks["target"].token_bytes // 16
    )  # one layer of 16
    assert own.networks["draft-mtp"].slot_bytes == 0
    assert own.taken.parked == 4 * 16 * own.networks["target"].parked_bytes
    assert of(HYBRID, draft_max=4).taken.parked == own.taken.parked // 4
    plain = of(HYBRID, spec_type="suffix")
    assert list(plain.networks) == ["target"]
    both = of(HYBRID, model_draft=written("Qwen3.5-0.8B"))
    assert both.drafters == ("forced", "prediction", "suffix", "draft-model")
    target, draft = both.networks.values()
    assert draft.n_params == of("Qwen3.5-0.8B").networks["target"].n_params
    assert both.page_bytes == PAGE_SIZE * (target.token_bytes + draft.token_bytes)
    assert both.taken.states == 4 * (target.slot_bytes + draft.slot_bytes)
    assert both.taken.weights == target.weight_bytes + draft.weight_bytes


@pytest.mark.parametrize(
    ("settings", "setting"),
    [
        ({"ctx_size": 50_000}, "ctx_size"),
        ({"parallel": 64, "batch_size": 64}, "parallel"),
        ({"spec_type": "draft-mtp"}, "spec_type"),
        ({"spec_type": "none", "model_draft": "x"}, "model_draft"),
        ({"dtype": "int4"}, "dtype"),
    ],
)
def test_settings_that_a_start_would_refuse(
    of: Callable[..., Forecast], settings: dict[str, Any], setting: str
) -> None:
    with pytest.raises(SettingError) as caught:
        of("Qwen3-8B", **settings)
    assert caught.value.setting == setting


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"quantization_config": {"quant_method": "quark"}}, "quantization_config: quant_method"),
        ({"architectures": ["FalconForCausalLM"]}, "FalconForCausalLM is not supported"),
        ({"num_hidden_layers": "many"}, "num_hidden_layers"),
        ({"num_nextn_predict_layers": -1}, "num_nextn_predict_layers"),
    ],
)
def test_configs_that_cannot_be_served(written: Any, changes: dict[str, Any], told: str) -> None:
    with pytest.raises(UnsupportedModel, match=told):
        forecast(Settings(model=written("Qwen3-8B", **changes)))


def test_heads_are_refused_as_draft_models(of: Callable[..., Forecast], written: Any) -> None:
    head = written("Llama-3.2-1B", draft_vocab_size=32000)
    with pytest.raises(UnsupportedModel, match="draft_vocab_size = 32000: the config of a draft head"):
        of("Llama-3.1-8B", model_draft=head)
    with pytest.raises(LoadError, match="no such folder"):
        of("Llama-3.1-8B", model_draft="./nowhere.json")


def test_nothing_is_allocated(of: Callable[..., Forecast]) -> None:
    assert of("GLM-4.5").taken.weights > 700e9, "more than any machine of ours has"


def test_of_ranks_the_first_ones_memory(of: Callable[..., Forecast]) -> None:
    """Half the heads and features; norms, routers and embeddings are on every rank."""
    whole, part = of("Qwen3-8B"), of("Qwen3-8B", tensor_parallel_size=2)
    one, other = whole.networks["target"], part.networks["target"]
    assert other.n_params == one.n_params
    assert other.token_bytes == one.token_bytes // 2
    assert 0.5 < other.weight_bytes / one.weight_bytes < 0.56
    with pytest.raises(SettingError, match="must divide the model's 32 attention heads"):
        of("Qwen3-8B", tensor_parallel_size=3)
