"""GGUF files of Gemma 4's assistant: guesses and texts are those of the folder, files that lie are refused."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from slipstream.engine.batch import Span
from slipstream.engine.checkpoint.gguf.files import GgufTensors
from slipstream.engine.errors import CheckpointMismatch, DraftMismatch, LoadError, UnsupportedModel
from slipstream.engine.layers.decoder import Taps
from slipstream.engine.models.heads.assistant import Assistant, load_assistant
from slipstream.engine.models.network import Network
from slipstream.engine.models.registry import read_model
from slipstream.engine.service.start.draft_network import draft_source, head_token_bytes
from slipstream.engine.service.start.sizes import Checkpoint
from slipstream.engine.settings import Settings
from slipstream.engine.speculate.registry import kind_of
from slipstream.kernels.matmul.quantized import widened
from tests.assistant_checkpoint import assistant_checkpoint
from tests.checkpoints import tiny_checkpoint
from tests.gguf_files import Blocks, Contents, gguf_of
from tests.oracle.feeding import CPU, N_CTX, Windowed, loaded, rows
from tests.oracle.head_rounds import text
from tests.oracle.lab import Bench, Folders, Lab, play
from tests.oracle.lossless import demo_cases

pytestmark = pytest.mark.usefixtures("_selected")
CLUSTERS = {"use_ordered_embeddings": True, "num_centroids": 24, "centroid_intermediate_top_k": 5}


@dataclass
class Made:
    """A target with its assistant, and the files of both."""

    target: Path
    folder: Path
    target_contents: Contents
    contents: Contents


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Made:
    scratch = tmp_path_factory.mktemp("pair")
    target = tiny_checkpoint("gemma4", scratch / "target")
    folder = assistant_checkpoint(target, scratch / "assistant")
    return Made(target, folder, gguf_of(target), gguf_of(folder, target))


@pytest.fixture(scope="module")
def target(pair: Made, _selected: None) -> Network:
    return loaded(pair.target)


def guesses(head: Assistant, target: Network) -> Tensor:
    """Three guesses behind texts shorter and longer than the window: [3, 3, vocab + d_target]."""
    runner, texts = Windowed(target), [text(i, n) for i, n in enumerate((3, 17, 90))]
    states = []
    for slot, ids in enumerate(texts):
        taps = Taps(head.taps)
        runner.feed(rows(slot, ids, 0, len(ids) - 1), taps=taps)
        states.append(taps.of(head.taps)[0][-1:])
    state, found = torch.cat(states), []  # [3, d_target]
    for step in range(3):
        spans = [Span(slot, (ids[-1 - step],), len(ids) - 2, 0, 1) for slot, ids in enumerate(texts)]
        with torch.inference_mode():
            said, state = head.run(runner.cache.batch("target", spans), state, runner.store)
            found.append(torch.cat((head.logits(said), state), -1))
    assert all(one[one.isfinite()].std() > 0.3 for one in found), (
        "what is said must be large enough to show a difference"
    )
    return torch.stack(found)


def test_every_tensor_comes_back(pair: Made, tmp_path: Path) -> None:
    path, stored = pair.contents.write(tmp_path / "head.gguf"), load_file(pair.folder / "model.safetensors")
    read = GgufTensors(path)
    assert set(read.names) == stored.keys()
    for name, one in stored.items():
        assert torch.equal(widened(read.read(name)), one), name


def test_guesses_are_the_folders(pair: Made, target: Network, tmp_path: Path) -> None:
    path = pair.contents.write(tmp_path / "head.gguf")
    assert kind_of(path) == kind_of(pair.folder) == "draft-assistant"
    ours, theirs = (load_assistant(of, target, N_CTX) for of in (path, pair.folder))
    assert (ours.taps, ours.sources, ours.n_params) == (theirs.taps, theirs.sources, theirs.n_params)
    assert torch.equal(guesses(ours, target), guesses(theirs, target))
    file = pair.target_contents.write(tmp_path / "target.gguf")
    twin = loaded(file)
    assert torch.equal(guesses(load_assistant(path, twin, N_CTX), twin), guesses(theirs, target))


def test_blocks(pair: Made, target: Network, tmp_path: Path) -> None:
    contents = pair.contents.as_type("Q8_0")
    assert isinstance(contents.tensors["nextn.pre_projection.weight"], Blocks)
    paths = [one.write(tmp_path / f"{i}.gguf") for i, one in enumerate((contents, contents.widened()))]
    ours, wide, exact = (guesses(load_assistant(of, target, N_CTX), target) for of in (*paths, pair.folder))
    assert (ours - wide).abs().max() < 1e-4 * wide.abs().max()
    assert not torch.equal(wide, exact)


def test_clusters_are_left_out(pair: Made, target: Network, tmp_path: Path) -> None:
    """Guesses look at all tokens: what clusters leave of them are the same numbers."""
    folder = assistant_checkpoint(pair.target, tmp_path / "clusters", **CLUSTERS)
    path = gguf_of(folder, pair.target).write(tmp_path / "head.gguf")
    ours, theirs = (guesses(load_assistant(of, target, N_CTX), target) for of in (path, folder))
    known = theirs.isfinite()
    assert known.sum() == 9 * (5 * 16 + 64), "five clusters, and a state of 64 numbers"
    assert (ours - theirs)[known].abs().max() < 1e-4
    assert ours.isfinite().all()


def test_the_file_drafts(pair: Made, target: Network, tmp_path: Path) -> None:
    """As `-md`, for the folder of its target and for the target's file; the same texts, of the same guesses."""
    path = pair.contents.write(tmp_path / "head.gguf")
    file = pair.target_contents.write(tmp_path / "target.gguf")
    source = draft_source(path, Checkpoint(file, read_model(file), CPU, torch.float32))
    assert source is not None
    assert (source.name, source.path) == ("draft-assistant", path)
    own = Checkpoint(file, read_model(file), CPU, torch.float32)
    assert head_token_bytes(source, own, Settings(model=str(file))) == 0
    played = []
    for of, head in ((pair.target, pair.folder), (pair.target, path), (file, path)):
        lab = Lab(Folders(of, None, {"draft-assistant": head}), torch.float32, n_ctx=512)
        cases = demo_cases(lab, "warm", 2)
        one = play(lab, Bench(("draft-assistant",), adaptive=False), cases)
        assert one.tokens == play(lab, Bench(), cases).tokens
        counts = [(done.speculation.n_drafted, done.speculation.n_accepted) for done in one.done.values()]
        played.append((one.tokens, counts))
    assert played[0] == played[1] == played[2]
    assert sum(n_kept for _, n_kept in played[0][1]) > 0


def test_what_a_file_need_not_say(pair: Made, target: Network, tmp_path: Path) -> None:
    """Nor does a cap of logits change anything, which no assistant has."""
    keys = (".attention.shared_kv_layers", ".rope.freq_base_swa", ".rope.dimension_count_swa")
    changed = pair.contents.with_keys({**dict.fromkeys(keys), ".final_logit_softcapping": 30.0})
    path = changed.write(tmp_path / "head.gguf")
    ours, theirs = (load_assistant(of, target, N_CTX) for of in (path, pair.folder))
    assert torch.equal(guesses(ours, target), guesses(theirs, target))


def test_it_is_no_model(pair: Made, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match=r"head\.gguf: .*Gemma4AssistantForCausalLM"):
        read_model(pair.contents.write(tmp_path / "head.gguf"))


REFUSED: list[tuple[str, Any, type[LoadError], str]] = [
    (".nextn_predict_layers", None, UnsupportedModel, "nextn_predict_layers = None: must be block_count = 4"),
    (".nextn_predict_layers", 3, UnsupportedModel, "nextn_predict_layers = 3: must be block_count = 4"),
    (".attention.shared_kv_layers", 2, UnsupportedModel, "shared_kv_layers = 2: must be block_count = 4"),
    (".embedding_length_out", None, LoadError, "gemma4-assistant.embedding_length_out is missing"),
    (".embedding_length_out", 32, DraftMismatch, "backbone_hidden_size = 32, the target has 64"),
    (".embedding_length_per_layer_input", 8, UnsupportedModel, "embedding_length_per_layer_input = 8: not"),
    (".attention.sliding_window_pattern", None, LoadError, "sliding_window_pattern is missing"),
    (".attention.sliding_window_pattern", [True] * 3, UnsupportedModel, "must be a list of 4 values"),
    (".attention.sliding_window_pattern", [False, *[True] * 3], LoadError, "has shape"),
    (".attention.sliding_window", 17, DraftMismatch, "sliding_window = 17, layer 2 of the target has 16"),
    (
        ".attention.key_length_swa",
        8,
        UnsupportedModel,
        "value_length_swa = 16: must be attention.key_length_swa",
    ),
    (".attention.head_count_kv", 2, DraftMismatch, "queries for 2 heads"),
    (".attention.scale", 0.5, UnsupportedModel, "gemma4-assistant.attention.scale = 0.5: not supported"),
    (".expert_count", 8, UnsupportedModel, "expert_count = 8: an assistant has no experts"),
    (".rope.scaling.factor", 2.0, UnsupportedModel, "rope.scaling.factor = 2.0: not supported"),
    ("rope_freqs.weight", None, LoadError, "tensor rope_freqs.weight is missing"),
    (
        "nextn.post_projection.weight",
        torch.ones(32, 64),
        LoadError,
        "has shape [32, 64], the config asks for",
    ),
    ("masked_embd_centroids.weight", torch.ones(24, 64), CheckpointMismatch, "unused: masked_embd_centroids"),
    ("blk.2.layer_output_scale.weight", None, CheckpointMismatch, "missing: blk.2.layer_output_scale.weight"),
]


@pytest.mark.parametrize(("name", "value", "error", "message"), REFUSED, ids=lambda one: str(one)[:40])
def test_files_that_lie_are_refused(
    pair: Made, target: Network, tmp_path: Path, name: str, value: Any, error: type[LoadError], message: str
) -> None:
    change = pair.contents.with_keys if name.startswith(".") else pair.contents.with_tensors
    path = change({name: value}).write(tmp_path / "head.gguf")
    with pytest.raises(LoadError) as caught:
        load_assistant(path, target, N_CTX)
    assert message in str(caught.value)
    assert str(caught.value).startswith(str(path))
    assert type(caught.value) is error, caught.value
