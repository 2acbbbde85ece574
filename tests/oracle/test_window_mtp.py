"""MTP heads of several layers with windows, MiMo-V2's and Step's: guesses against their definition, and engines."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from slipstream.engine.errors import DraftMismatch, UnsupportedModel
from slipstream.engine.models.blueprint import draw_mtp
from slipstream.engine.models.heads.head_choices import HeadChoices
from slipstream.engine.models.heads.mtp import load_mtp
from slipstream.engine.models.network import Network
from slipstream.engine.models.registry import load_network, read_model
from tests import head_checkpoints as made
from tests.checkpoints import with_config
from tests.oracle.head_rounds import CPU, N_CTX, PAGE, VOCAB, text
from tests.oracle.lab import Bench, Folders, Lab, play
from tests.oracle.lossless import SAMPLINGS, benches, demo_cases, disturbed
from tests.oracle.mtp_stage import NAME, Stage
from tests.oracle.window_heads import D_MODEL, N_LAYERS, Layers, blocks_of, checkpoint, released, with_head
from tests.tiny_families import SLIDING

pytestmark = pytest.mark.usefixtures("_selected")


@dataclass
class Made:
    """A target, a head beside it, and what the head should say."""

    folder: Path
    target: Network
    tensors: made.Tensors
    oracle: Layers


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Made]:
    done: dict[str, tuple[Path, Network, Any]] = {}

    def of(family: str, recycled: str) -> Made:
        if family not in done:
            folder = checkpoint(family, tmp_path_factory.mktemp(family))
            done[family] = (
                folder,
                load_network(folder, torch.float32, CPU, N_CTX, VOCAB),
                blocks_of(family, folder),
            )
        folder, target, blocks = done[family]
        tensors, oracle = released(family, blocks, target, recycled)
        return Made(folder, target, tensors, oracle)

    return of


@pytest.mark.sampled(keep=3)
@pytest.mark.parametrize(
    ("family", "recycled", "chosen"),
    [
        ("mimo", "target", "auto"),
        ("mimo", "normed", "normed"),
        ("mimo", "raw", "raw"),
        ("step", "raw", "auto"),
        ("step", "normed", "normed"),
        ("step", "target", "target"),
    ],
)
def test_guesses_are_those_of_the_familys_definition(
    make: Callable[..., Made],
    family: str,
    recycled: str,
    chosen: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Prompts in chunks, texts shorter and longer than the window; drafts of other depths, some of them kept."""
    one = make(family, recycled)
    head = load_mtp(made.write(tmp_path, one.tensors, None), one.target, N_CTX, HeadChoices(recycled=chosen))
    assert head.taps == (one.target.config.n_layers,), "the stream before the final norm"
    assert [need.window for need in head.needs] == [one.oracle.window] * N_LAYERS
    stage, rng = Stage(head, one.target, one.oracle), random.Random(3)
    long, first, short = stage.add(text(1, 40)), stage.add(text(2, 2)), stage.add(text(3, 9))
    stage.accept({long.id: 1, short.id: 3})
    stage.accept({first.id: 1, long.id: 31, short.id: 2})
    stage.accept({long.id: 7, short.id: 3})
    stage.go_on(rng, monkeypatch)
    assert stage.n_compared > 40
    assert stage.worst < 1e-5


@pytest.mark.parametrize(("family", "recycled"), [("mimo", "target"), ("step", "raw")])
def test_of_a_prompt_that_takes_more_pages_than_there_are_the_end_is_fed(
    make: Callable[..., Made], family: str, recycled: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = make(family, recycled)
    head = load_mtp(made.write(tmp_path, one.tensors, None), one.target, N_CTX)
    stage = Stage(head, one.target, one.oracle, n_window_pages=N_CTX // PAGE)
    other, slot = stage.add(text(1, 40)), stage.add(text(2, N_CTX - 10))
    for one_slot, n_drafts in ((other, 1), (slot, 5)):
        stage.accept({one_slot.id: len(one_slot.tokens) - 1})
        assert len(stage.draft({one_slot.id: n_drafts}, monkeypatch)[one_slot.id]) == n_drafts
    assert stage.cache.start(slot.id, NAME) > 0
    assert stage.worst < 1e-5


@pytest.mark.parametrize("family", ["mimo", "step"])
def test_a_head_in_the_targets_own_folder(make: Callable[..., Made], family: str, tmp_path: Path) -> None:
    one = make(family, "auto")
    folder = with_head(family, one.folder, one.tensors, tmp_path / "both")
    target = load_network(folder, torch.float32, CPU, N_CTX, VOCAB)
    head = load_mtp(folder, target, N_CTX)
    assert len(head.modules) == N_LAYERS
    assert head.is_chained == (family == "step")
    drawn = draw_mtp(read_model(folder), torch.float32, N_LAYERS)
    # The plan takes embedding and head for the target's, of which a released Step has copies.
    own = N_LAYERS * 2 * VOCAB * D_MODEL if family == "step" else 0
    assert drawn.needs == head.needs
    assert drawn.n_params == sum(tensor.numel() for tensor in one.tensors.values()) - own


@pytest.mark.sampled
@pytest.mark.parametrize("family", ["mimo", "step"])
@pytest.mark.parametrize("n", range(len(SAMPLINGS)), ids=list(SAMPLINGS))
def test_text_is_that_of_plain_decoding(
    make: Callable[..., Made], family: str, n: int, tmp_path: Path
) -> None:
    """Whatever is drafted, cut, cancelled, resumed, preempted or saved, with passes replayed and launched early."""
    one, long = make(family, "auto"), {"max_position_embeddings": 1024}
    folder = with_head(family, one.folder, one.tensors, tmp_path / "both")
    config = long if family == "mimo" else {"text_config": {**text_config(folder), **long}}
    folder = with_config(folder, tmp_path / "long", **config)
    lab = Lab(Folders(folder, None, {NAME: folder}), torch.float32)
    cases = demo_cases(lab, list(SAMPLINGS)[n], 4)
    expected, n_accepted = play(lab, Bench(), cases), 0
    for i, chain in enumerate(((NAME,), ("prediction", "suffix", NAME))):
        for bench in list(benches(chain))[(i + n) % 3 :: 3]:
            found = disturbed(lab, bench, cases, expected, seed=i)
            assert found.n_wrong == 0, bench
            n_accepted += found.n_accepted
    assert n_accepted > 0


def text_config(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "config.json").read_text())["text_config"]
    return found


def test_what_a_head_reads_can_be_chosen(make: Callable[..., Made], tmp_path: Path) -> None:
    one = make("step", "auto")
    folder = made.write(tmp_path, one.tensors, None)
    assert load_mtp(folder, one.target, N_CTX, HeadChoices([6])).taps == (6,)
    with pytest.raises(DraftMismatch, match="reads one hidden state, not 2"):
        load_mtp(folder, one.target, N_CTX, HeadChoices([5, 6]))


def test_layers_of_which_the_config_does_not_say_what_they_are(
    make: Callable[..., Made], tmp_path: Path
) -> None:
    one = make("step", "auto")
    short = {
        "mtp_layer_types": [SLIDING] * 2,
        "num_nextn_predict_layers": 2,
        "mtp_mlp_layer_types": ["dense"] * 2,
    }
    text_keys = {**text_config(one.folder), **short}
    target = load_network(
        with_config(one.folder, tmp_path / "t", text_config=text_keys), torch.float32, CPU, N_CTX
    )
    with pytest.raises(UnsupportedModel, match="does not say what layer 7 is"):
        load_mtp(made.write(tmp_path / "head", one.tensors, None), target, N_CTX)
