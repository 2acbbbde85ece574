"""MTP heads of several layers with windows, MiMo-V2's and Step's: guesses against blocks of transformers' own.

Neither family's MTP layers are in transformers, or not as they are released; their blocks are its decoder layers.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig
from transformers.models.mimo_v2_flash.modeling_mimo_v2_flash import MiMoV2FlashModel, MiMoV2FlashRMSNorm
from transformers.models.step3p7.modeling_step3p7 import Step3p7RMSNorm, Step3p7TextModel

from slipstream.engine.errors import DraftMismatch, UnsupportedModel
from slipstream.engine.models.blueprint import draw_mtp
from slipstream.engine.models.heads.head_choices import HeadChoices
from slipstream.engine.models.heads.mtp import load_mtp
from slipstream.engine.models.network import Network
from slipstream.engine.models.registry import load_network, read_model
from tests import head_checkpoints as made
from tests.checkpoints import edited, tiny_checkpoint, with_config
from tests.oracle.head_rounds import CPU, N_CTX, VOCAB, text
from tests.oracle.lab import Bench, Folders, Lab, play
from tests.oracle.lossless import SAMPLINGS, benches, demo_cases, disturbed
from tests.oracle.mtp_stage import NAME, Stage
from tests.tiny_families import FULL, SLIDING

pytestmark = pytest.mark.usefixtures("_selected")
N_LAYERS = 3
D_MODEL = 64
# What a released file calls parts of a block.
RENAMED = {
    "mimo": {
        "self_attn.sinks": "self_attn.attention_sink_bias",
        "post_attention_layernorm": "pre_mlp_layernorm",
    },
    "step": {},
}
STEP_LAYERS = {
    "num_nextn_predict_layers": N_LAYERS,
    "layer_types": [FULL, SLIDING, SLIDING, SLIDING, FULL] + [SLIDING] * N_LAYERS,
    "mlp_layer_types": ["dense", "sparse", "dense", "sparse", "sparse"] + ["dense"] * N_LAYERS,
}


@dataclass
class Layers:
    """A head as its family defines it, over a whole text. A sequence of guesses starts behind the last token."""

    blocks: Any  # a model of transformers that has them
    embedding: Tensor  # [vocab, d_model]
    heads: Sequence[Tensor]  # [vocab, d_model], of each layer
    norms: Sequence[dict[str, nn.Module]]  # of each layer: token, hidden, last
    joints: Sequence[Tensor]  # [d_model, 2 * d_model]
    window: int
    recycled: str  # "raw", "normed" or "target"

    @torch.inference_mode()
    def logits(self, ids: Sequence[int], guesses: Sequence[int], hidden: Tensor) -> list[Tensor]:
        """Of each guess, [vocab]. ids: x_0 … x_n; hidden: the target's states at 0 … n - 1, [n, d_model]."""
        whole, found = [*ids, *guesses], list[Tensor]()
        reads = states = hidden
        for j in range(len(guesses)):
            k = min(j, N_LAYERS - 1)
            if j >= N_LAYERS:  # the last layer once more, with its own state of the row before
                reads = torch.cat((reads, states[-1:]))
            else:
                reads = hidden if self.recycled == "target" else states
            tokens = torch.tensor([*whole, *[0] * N_LAYERS][1 + k : 1 + k + len(reads)])
            raw, normed = self.run(k, tokens, reads)
            states = raw if self.recycled == "raw" else normed
            row = len(hidden) - 1 if j < N_LAYERS else len(reads) - 1
            found.append(self.heads[k] @ normed[row])
        return found

    def run(self, k: int, tokens: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Layer k over rows at positions 0, 1, …: its block's output and the same normed, [n, d_model] each."""
        norms, at = self.norms[k], torch.arange(len(tokens))
        halves = norms["token"](self.embedding[tokens]), norms["hidden"](hidden)
        x = (torch.cat(halves, -1) @ self.joints[k].T)[None]
        distance = at[:, None] - at
        hides = (distance < 0) | (distance >= self.window)
        mask = torch.zeros(hides.shape).masked_fill(hides, float("-inf"))[None, None]
        turns = self.blocks.rotary_emb(x, at[None], SLIDING)
        raw = self.blocks.layers[k](x, attention_mask=mask, position_embeddings=turns)[0]
        return raw, norms["last"](raw)


def checkpoint(family: str, folder: Path) -> Path:
    """A tiny target."""
    if family == "mimo":
        return tiny_checkpoint("mimo_v2_flash", folder)
    return tiny_checkpoint("step3p7", folder, changes=STEP_LAYERS)


def blocks_of(family: str, target: Path) -> Any:
    """transformers' blocks of the layers, random."""
    config = AutoConfig.from_pretrained(target, attn_implementation="eager").get_text_config()
    config.num_hidden_layers, config.layer_types = N_LAYERS, [SLIDING] * N_LAYERS
    config.mlp_layer_types = ["dense"] * N_LAYERS
    if family == "step":
        heads = {"num_attention_heads": config.num_sliding_attention_heads}
        config.per_layer_config = {str(i): heads for i in range(N_LAYERS)}
        config.swiglu_limits = config.swiglu_limits_shared = None
    torch.manual_seed(8)
    model = (MiMoV2FlashModel if family == "mimo" else Step3p7TextModel)(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(4.0)
            else:
                parameter.add_(0.2 * torch.randn_like(parameter))
    return model.requires_grad_(requires_grad=False)


def released(family: str, blocks: Any, target: Network, recycled: str) -> tuple[made.Tensors, Layers]:
    """The tensors as a released file has them, and the head that they make."""
    generator = torch.Generator().manual_seed(9)

    def noise(*shape: int, scale: float) -> Tensor:
        return scale * torch.randn(*shape, generator=generator)

    embedding = target.decoder.embedding.weight
    assert isinstance(embedding, Tensor)
    names = ("enorm", "hnorm", "final_layernorm" if family == "mimo" else "transformer.shared_head.norm")
    kind, mean = (MiMoV2FlashRMSNorm, 1.0) if family == "mimo" else (Step3p7RMSNorm, 0.0)
    prefix = "model.mtp.layers.{}" if family == "mimo" else "model.layers.{}"
    tensors: made.Tensors = {}
    heads, all_norms, joints = [], [], []
    for i in range(N_LAYERS):
        layer = prefix.format(i if family == "mimo" else 5 + i)
        for name, one in blocks.layers[i].state_dict().items():
            for ours, theirs in RENAMED[family].items():
                name = name.replace(ours, theirs)
            tensors[f"{layer}.{name}"] = one.clone()
        norms: dict[str, nn.Module] = {}
        for key, name in zip(("token", "hidden", "last"), names, strict=True):
            norms[key] = kind(D_MODEL, eps=target.spec.norm.eps)
            weight = mean + noise(D_MODEL, scale=0.2)
            norms[key].load_state_dict({"weight": weight})
            tensors[f"{layer}.{name}.weight"] = weight
        joint = noise(D_MODEL, 2 * D_MODEL, scale=0.05)
        joint[:, :D_MODEL] += torch.eye(D_MODEL)  # what the target makes of a token in part
        joints.append(joint)
        tensors[f"{layer}.eh_proj.weight"] = joints[-1]
        heads.append(noise(VOCAB, D_MODEL, scale=0.15))
        if family == "step":
            tensors[f"{layer}.transformer.shared_head.output.weight"] = heads[-1]
            tensors[f"{layer}.embed_tokens.weight"] = embedding.clone()
        all_norms.append(norms)
    window = blocks.config.sliding_window
    return tensors, Layers(blocks, embedding, heads, all_norms, joints, window, recycled)


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
        if family == "mimo":  # its layers share the target's head
            with torch.inference_mode():
                matrix = target.decoder.head(torch.eye(D_MODEL)).T.clone()
            oracle.heads = [matrix] * N_LAYERS
        return Made(folder, target, tensors, oracle)

    return of


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
    for step in range(7):
        order = rng.sample([0, 1, 2], 3)
        drafts = stage.draft({i: rng.randint(1, 5) for i in order[: 3 - step % 2]}, monkeypatch)
        gains = {}
        for slot in (stage.slots[i] for i in rng.sample(order, 3 - (step == 3))):
            draft = drafts.get(slot.id, ())
            n_accepted = rng.randint(0, len(draft))
            slot.tokens += [*draft[:n_accepted], rng.randrange(VOCAB)]
            gains[slot.id] = 1 + n_accepted
        stage.accept(gains)
    assert stage.n_compared > 40
    assert stage.worst < 1e-5


def with_head(family: str, made_of: Made, folder: Path) -> Path:
    """The target's folder with the head in it, as released; Step's in the names of its own files."""
    names = {"model.language_model.": "model."} if family == "step" else {}

    def add(tensors: dict[str, Tensor]) -> None:
        for name in list(tensors):
            for ours, theirs in names.items():
                tensors[name.replace(ours, theirs)] = tensors.pop(name)
        tensors.update(made_of.tensors)

    return edited(made_of.folder, folder, add)


@pytest.mark.parametrize("family", ["mimo", "step"])
def test_a_head_in_the_targets_own_folder(make: Callable[..., Made], family: str, tmp_path: Path) -> None:
    one = make(family, "auto")
    folder = with_head(family, one, tmp_path / "both")
    target = load_network(folder, torch.float32, CPU, N_CTX, VOCAB)
    head = load_mtp(folder, target, N_CTX)
    assert len(head.modules) == N_LAYERS
    assert head.is_chained == (family == "step")
    drawn = draw_mtp(read_model(folder), torch.float32, N_LAYERS)
    # The plan takes embedding and head for the target's, of which a released Step has copies.
    own = N_LAYERS * 2 * VOCAB * D_MODEL if family == "step" else 0
    assert drawn.needs == head.needs
    assert drawn.n_params == sum(tensor.numel() for tensor in one.tensors.values()) - own


@pytest.mark.sampled("engine")
@pytest.mark.parametrize("family", ["mimo", "step"])
@pytest.mark.parametrize("n", range(len(SAMPLINGS)), ids=list(SAMPLINGS))
def test_text_is_that_of_plain_decoding(
    make: Callable[..., Made], family: str, n: int, tmp_path: Path
) -> None:
    """Whatever is drafted, cut, cancelled, resumed, preempted or saved, with passes replayed and launched early."""
    one, long = make(family, "auto"), {"max_position_embeddings": 1024}
    folder = with_head(family, one, tmp_path / "both")
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
