"""Gemma 4's assistant against transformers': its guesses over the target's own keys and values, and engines with it."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import Gemma4AssistantForCausalLM

from slipstream.engine.batch import Span
from slipstream.engine.errors import DraftMismatch, LoadError, UnsupportedModel
from slipstream.engine.layers.decoder import Taps
from slipstream.engine.models.heads.assistant import Assistant, load_assistant
from slipstream.engine.models.heads.head_choices import HeadChoices
from slipstream.engine.speculate.registry import kind_of
from tests.assistant_checkpoint import all_layers_shared, assistant_checkpoint
from tests.checkpoints import edited, noised_copy, theirs, tiny_checkpoint, with_config
from tests.oracle.feeding import N_CTX, Windowed, difference, loaded, rows
from tests.oracle.lab import Bench, Folders, Lab, play
from tests.oracle.lossless import SAMPLINGS, benches, demo_cases, disturbed

pytestmark = pytest.mark.usefixtures("_selected")
NAME = "draft-assistant"
WINDOW = 16
VARIANTS: dict[str, dict[str, Any]] = {
    "all tokens": {},
    "clusters": {"use_ordered_embeddings": True, "num_centroids": 24, "centroid_intermediate_top_k": 5},
}


@dataclass(frozen=True)
class Pair:
    """A target and its assistant, here and in transformers."""

    target: Path
    folder: Path
    their_target: Any
    theirs: Any

    def guesses(self, ids: Sequence[int], tokens: Sequence[int], position: int) -> list[Tensor]:
        """transformers' logits of the guesses behind x_0 … x_n, [vocab] each. tokens: x_n, then the guesses.

        position: by which queries turn. The target has computed all but x_n.
        """
        with torch.inference_mode(), all_layers_shared():
            told = self.their_target(
                torch.tensor([ids[:-1]]), output_hidden_states=True, return_shared_kv_states=True
            )
            state, found = told.hidden_states[-1][:, -1:], []
            for token in tokens:
                embedded = self.their_target.get_input_embeddings()(torch.tensor([[token]]))
                out = self.theirs(
                    inputs_embeds=torch.cat((embedded, state), -1),
                    position_ids=torch.tensor([[position]]),
                    shared_kv_states=told.shared_kv_states,
                )
                state = out.last_hidden_state
                found.append(out.logits[0, 0].float())
        return found


@pytest.fixture(scope="module")
def pair_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Pair]:
    made: dict[str, Pair] = {}

    def get(variant: str) -> Pair:
        if variant not in made:
            target = tiny_checkpoint("gemma4", tmp_path_factory.mktemp("target"))
            folder = assistant_checkpoint(target, tmp_path_factory.mktemp("assistant"), **VARIANTS[variant])
            with all_layers_shared():
                network = Gemma4AssistantForCausalLM.from_pretrained(folder, attn_implementation="eager")
            # It sees its window and one position more from wherever it stands; here it sees one less.
            network.config.get_text_config().sliding_window = WINDOW - 2
            made[variant] = Pair(target, folder, theirs(target), network.eval())
        return made[variant]

    return get


def fed(runner: Windowed, head: Assistant, slot: int, ids: Sequence[int]) -> Tensor:
    """The target computes a text in two chunks; its state at the last position, [1, d_target]."""
    start, taps = len(ids) // 2, Taps(head.taps)
    if start:
        runner.feed(rows(slot, ids, 0, start))
    runner.feed(rows(slot, ids, start, len(ids) - start), taps=taps)
    return taps.of(head.taps)[0][-1:]


def text(seed: int, n: int) -> list[int]:
    return torch.randint(384, (n,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.mark.sampled(keep=3)
@pytest.mark.usefixtures("ops")
@pytest.mark.parametrize("position", ["newest", "before"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_guesses_are_those_of_transformers(
    pair_of: Callable[[str], Pair], variant: str, position: str
) -> None:
    """Texts shorter and longer than the window, side by side; what lies outside of it is NaN."""
    pair = pair_of(variant)
    target = loaded(pair.target)
    head = load_assistant(pair.folder, target, N_CTX, HeadChoices(position=position))
    runner, texts = Windowed(target), [text(i, n) for i, n in enumerate((2, 9, 17, 33, 90))]
    states = torch.cat([fed(runner, head, slot, ids[:-1]) for slot, ids in enumerate(texts)])
    drafted = [[ids[-1], *text(50 + i, 3)] for i, ids in enumerate(texts)]
    expected = [
        pair.guesses(ids, tokens, len(ids) - (1 if position == "newest" else 2))
        for ids, tokens in zip(texts, drafted, strict=True)
    ]
    for step in range(4):
        spans = [Span(slot, (drafted[slot][step],), len(ids) - 2, 0, 1) for slot, ids in enumerate(texts)]
        with torch.inference_mode():
            said, states = head.run(runner.cache.batch("target", spans), states, runner.store)
            logits = head.logits(said)  # [n_slots, vocab]
        for ours, one in zip(logits, (of[step] for of in expected), strict=True):
            seen = ~ours.isinf()
            assert seen.sum() == (384 if variant == "all tokens" else 5 * 16)
            assert difference(ours[seen], one[seen]) < 1e-4
            assert one[seen].std() > 0.3, "logits must be large enough to show a difference"
            assert torch.equal(ours.argmax(), one.argmax())


@pytest.fixture(scope="module")
def lab(pair_of: Callable[[str], Pair], tmp_path_factory: pytest.TempPathFactory) -> Lab:
    """A target of the suite's length, itself with noise as a draft model, and its assistant."""
    changes = {"max_position_embeddings": 1024}
    target = tiny_checkpoint("gemma4", tmp_path_factory.mktemp("target"), changes=changes)
    draft = noised_copy(target, tmp_path_factory.mktemp("draft"), 0.02)
    folder = assistant_checkpoint(target, tmp_path_factory.mktemp("assistant"))
    return Lab(Folders(target, draft, {NAME: folder}), torch.float32)


@pytest.mark.sampled
@pytest.mark.parametrize("n", range(len(SAMPLINGS)), ids=list(SAMPLINGS))
def test_text_is_that_of_plain_decoding(lab: Lab, n: int, *, is_whole: bool) -> None:
    """Whatever is drafted, cut, cancelled, resumed, preempted or saved, with passes replayed and launched early."""
    name = list(SAMPLINGS)[n]
    cases = demo_cases(lab, name, 4 if is_whole else 2)
    expected = play(lab, Bench(), cases)
    for i, chain in enumerate(((NAME,), ("prediction", "suffix", "draft-model", NAME))):
        for bench in list(benches(chain))[(i + n) % 3 :: 3]:
            found = disturbed(lab, replace(bench, n_window_pages=60), cases, expected, seed=i)
            assert found.n_wrong == 0, bench
            assert found.n_accepted > 0 or (name, chain) == ("greedy", (NAME,))  # not as good as that


@pytest.mark.sampled
def test_captured_guesses_are_those_of_the_passes_themselves(lab: Lab) -> None:
    cases = demo_cases(lab, "warm", 4)
    counts = []
    for captured in (False, True):
        bench = Bench((NAME,), n_slots=3, adaptive=False, draft_max=5, captured=captured)
        done = play(lab, bench, cases).done
        counts.append([(one.speculation.n_drafted, one.speculation.n_accepted) for one in done.values()])
    assert counts[0] == counts[1]
    assert sum(n_accepted for _, n_accepted in counts[0]) > 10


def test_kind_of_folder(pair_of: Callable[[str], Pair]) -> None:
    pair = pair_of("all tokens")
    assert kind_of(pair.folder) == NAME
    assert kind_of(pair.target) == "draft-model"
    head = load_assistant(pair.folder, loaded(pair.target), N_CTX)
    assert head.needs == []
    assert list(head.sources) == [2, 2, 2, 3], "the last layers with keys and values of their own"
    assert head.taps == (7,)
    assert load_assistant(pair.folder, loaded(pair.target), N_CTX, HeadChoices([6])).taps == (6,)


def inner(**changes: Any) -> dict[str, Any]:
    return {"text_config": changes}


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        (inner(enable_moe_block=True), UnsupportedModel, "enable_moe_block = true: an assistant has no"),
        (inner(use_double_wide_mlp=True), UnsupportedModel, "use_double_wide_mlp = true"),
        (inner(hidden_size_per_layer_input=8), UnsupportedModel, "hidden_size_per_layer_input = 8"),
        (inner(num_kv_shared_layers=3), UnsupportedModel, "num_kv_shared_layers = 3: must be all 4 layers"),
        (inner(hidden_activation="silu"), UnsupportedModel, "hidden_activation = .*gelu_pytorch_tanh"),
        (inner(sliding_window=17), DraftMismatch, "sliding_window = 17, layer 2 of the target has 16"),
        (inner(sliding_window=1), DraftMismatch, "sliding_window = 1, layer 2"),
        (
            inner(num_key_value_heads=2),
            DraftMismatch,
            "queries for 2 heads of 16 values, layer 2 .* has 1 of 16",
        ),
        (inner(head_dim=32), DraftMismatch, "queries for 1 heads of 32 values, layer 2"),
        (inner(vocab_size=380), DraftMismatch, "vocab_size = 380, the target has 384 tokens"),
        ({"backbone_hidden_size": 80}, DraftMismatch, "backbone_hidden_size = 80, the target has 64"),
        ({"backbone_hidden_size": None}, UnsupportedModel, "backbone_hidden_size is missing"),
        ({"architectures": ["Other"]}, UnsupportedModel, "Other"),
    ],
)
def test_what_is_made_for_another_target_or_computes_something_else_is_refused(
    pair_of: Callable[[str], Pair],
    changes: dict[str, Any],
    error: type[LoadError],
    message: str,
    tmp_path: Path,
) -> None:
    pair = pair_of("all tokens")
    text = json.loads((pair.folder / "config.json").read_text())["text_config"]
    asked = {**changes, "text_config": {**text, **changes.get("text_config", {})}}
    with pytest.raises(error, match=message):
        load_assistant(with_config(pair.folder, tmp_path / "copy", **asked), loaded(pair.target), N_CTX)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_centroids": 25}, "num_centroids = 25: must divide the 384 rows"),
        (
            {"centroid_intermediate_top_k": 25},
            "centroid_intermediate_top_k = 25: must be at most num_centroids, 24",
        ),
        ({"num_centroids": 48}, r"masked_embedding\.centroids.* has shape \[24, 64\]"),
    ],
)
def test_clusters_that_make_no_sense_are_refused(
    pair_of: Callable[[str], Pair], changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    pair = pair_of("clusters")
    with pytest.raises(LoadError, match=message):
        load_assistant(with_config(pair.folder, tmp_path / "copy", **changes), loaded(pair.target), N_CTX)


def test_an_order_that_names_a_token_twice_is_refused(pair_of: Callable[[str], Pair], tmp_path: Path) -> None:
    pair = pair_of("clusters")

    def repeat(tensors: dict[str, Tensor]) -> None:
        tensors["masked_embedding.token_ordering"][1] = tensors["masked_embedding.token_ordering"][0]

    with pytest.raises(LoadError, match="token_ordering does not name each of 384 tokens once"):
        load_assistant(edited(pair.folder, tmp_path / "copy", repeat), loaded(pair.target), N_CTX)


def test_more_than_one_stream_is_refused(pair_of: Callable[[str], Pair]) -> None:
    pair = pair_of("all tokens")
    with pytest.raises(DraftMismatch, match="reads one hidden state, not 2"):
        load_assistant(pair.folder, loaded(pair.target), N_CTX, HeadChoices([1, 2]))
