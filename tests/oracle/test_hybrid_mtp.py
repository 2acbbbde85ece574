"""MTP layers of Qwen3.5 and Qwen3-Next in their target's folder, against the family's own layers in transformers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import Qwen3_5MoeTextConfig, Qwen3_5TextConfig, Qwen3NextConfig
from transformers.models.qwen3_5 import modeling_qwen3_5 as qwen3_5
from transformers.models.qwen3_5_moe import modeling_qwen3_5_moe as qwen3_5_moe
from transformers.models.qwen3_next import modeling_qwen3_next as qwen3_next

from slipstream.engine.batch import Span
from slipstream.engine.models.heads.mtp import load_mtp
from slipstream.engine.models.registry import load_network
from tests.checkpoints import theirs, tiny_checkpoint
from tests.oracle.feeding import Runner
from tests.oracle.head_rounds import CPU, N_CTX, VOCAB, Pages, text, worst

N = 60
# Per family: transformers' config, layer, norm and rotary embedding.
PARTS: dict[str, tuple[Any, ...]] = {
    "qwen3_5": (
        Qwen3_5TextConfig,
        qwen3_5.Qwen3_5DecoderLayer,
        qwen3_5.Qwen3_5RMSNorm,
        qwen3_5.Qwen3_5TextRotaryEmbedding,
    ),
    "qwen3_5_moe": (
        Qwen3_5MoeTextConfig,
        qwen3_5_moe.Qwen3_5MoeDecoderLayer,
        qwen3_5_moe.Qwen3_5MoeRMSNorm,
        qwen3_5_moe.Qwen3_5MoeTextRotaryEmbedding,
    ),
    "qwen3_next": (
        Qwen3NextConfig,
        qwen3_next.Qwen3NextDecoderLayer,
        qwen3_next.Qwen3NextRMSNorm,
        qwen3_next.Qwen3NextRotaryEmbedding,
    ),
}


class Theirs(nn.Module):
    """The formula of models' MTP around a layer of transformers."""

    def __init__(self, family: str, folder: Path) -> None:
        super().__init__()
        config_class, layer, norm, rotary = PARTS[family]
        config = config_class.from_pretrained(folder)
        config._attn_implementation = "eager"
        full = config.layer_types.index("full_attention")
        width = config.hidden_size
        self.pre_fc_norm_embedding = norm(width, eps=config.rms_norm_eps)
        self.pre_fc_norm_hidden = norm(width, eps=config.rms_norm_eps)
        self.fc = nn.Linear(2 * width, width, bias=False)
        self.layers = nn.ModuleList([layer(config, full)])
        self.norm = norm(width, eps=config.rms_norm_eps)
        self.rotary = rotary(config)
        torch.manual_seed(3)
        with torch.no_grad():
            for parameter in self.parameters():
                noise = torch.randn_like(parameter)
                wide = parameter.dim() > 1
                parameter.copy_(noise * (0.5 * parameter.shape[-1] ** -0.5) if wide else 0.2 * noise)

    def forward(self, embedded: Tensor, hidden: Tensor) -> Tensor:
        """embedded, hidden: [n, d_model] -> [n, d_model], of position 0 onwards."""
        joined = torch.cat((self.pre_fc_norm_embedding(embedded), self.pre_fc_norm_hidden(hidden)), -1)
        x = self.fc(joined)[None]
        at = torch.arange(x.shape[1])[None]
        hidden_later = torch.full((x.shape[1], x.shape[1]), float("-inf")).triu(1)[None, None]
        y = self.layers[0](x, position_embeddings=self.rotary(x, at), attention_mask=hidden_later)
        result: Tensor = self.norm(y[0] if isinstance(y, tuple) else y)[0]
        return result


def with_mtp(family: str, folder: Path) -> Theirs:
    """Write an MTP layer into a family's checkpoint; returns that layer in transformers."""
    oracle = Theirs(family, folder).eval()
    tensors = load_file(folder / "model.safetensors")
    own = {name: one for name, one in oracle.state_dict().items() if not name.startswith("rotary")}
    tensors |= {f"mtp.{name}": one.clone() for name, one in own.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return oracle


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Theirs]]:
    """A family's checkpoint with an MTP layer in it, and that layer in transformers; made once."""
    known: dict[str, tuple[Path, Theirs]] = {}

    def get(family: str) -> tuple[Path, Theirs]:
        if family not in known:
            folder = tiny_checkpoint(family, tmp_path_factory.mktemp(family))
            known[family] = folder, with_mtp(family, folder)
        return known[family]

    return get


@pytest.fixture(autouse=True)
def _selected_here(_selected: None) -> None:
    """The ops of this machine."""


@pytest.mark.usefixtures("ops")
@pytest.mark.parametrize("family", PARTS)
def test_mtp_is_that_of_transformers(made: Callable[[str], tuple[Path, Theirs]], family: str) -> None:
    """In chunks, with rows of guesses in between that are thrown away; then looped on its own states."""
    folder, oracle = made(family)
    target = load_network(folder, torch.float32, CPU, N_CTX, VOCAB)
    head, ids = load_mtp(folder, target, N_CTX), text(7, N + 1)
    embedding = load_file(folder / "model.safetensors")["model.embed_tokens.weight"]
    with torch.inference_mode():
        outputs = theirs(folder)(torch.tensor([ids[:-1]]), output_hidden_states=True)
        features = outputs.hidden_states[-1][0]  # [N, d_model], after the final norm
        expected = oracle(embedding[torch.tensor(ids[1:])], features)
        pages, (layer,) = Pages(head.needs), head.modules
        said = []
        for a, b in ((0, 37), (37, 38), (38, N)):
            _, states = pages.run(layer, features[a:b], Span(0, ids[a + 1 : b + 1], a, 0, b - a))
            said.append(states)
            pages.run(layer, features[:3], Span(0, [5, 6, 7], b, 3, 3))
        assert worst(torch.cat(said), expected) < 1e-5
        again = [*ids[1:], 11, 12]
        carried = torch.cat((features, expected[-1:]))
        logits, state = pages.run(layer, expected[-1:], Span(0, [11], N, 1, 1))
        assert worst(state, oracle(embedding[torch.tensor(again[:-1])], carried)[-1:]) < 1e-5
        matrix = load_file(folder / "model.safetensors")["lm_head.weight"]
        assert worst(logits, state @ matrix[:VOCAB].T) < 1e-4


def test_the_target_leaves_its_mtp_layer_alone(made: Callable[[str], tuple[Path, Theirs]]) -> None:
    folder, _ = made("qwen3_5")
    network = load_network(folder, torch.float32, CPU, N_CTX, VOCAB)
    ids = text(3, 40)
    with torch.inference_mode():
        expected = theirs(folder)(torch.tensor([ids])).logits[0]
    assert worst(Runner(network).feed(Span(0, ids, 0, 0, 40)), expected[:, :VOCAB]) < 1e-4


def test_a_wrapper_brings_its_mtp_layer(made: Callable[[str], tuple[Path, Theirs]], tmp_path: Path) -> None:
    """The released files: `mtp.*` beside `model.language_model.*`, the config's keys under `text_config`."""
    folder, _ = made("qwen3_5")
    tensors = load_file(folder / "model.safetensors")
    renamed = {
        name.replace("model.", "model.language_model.", 1) if name.startswith("model.") else name: one
        for name, one in tensors.items()
    }
    save_file(renamed, tmp_path / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    outer = {"architectures": ["Qwen3_5ForConditionalGeneration"], "text_config": config}
    (tmp_path / "config.json").write_text(json.dumps(outer))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    results = []
    for place in (folder, tmp_path):
        target = load_network(place, torch.float32, CPU, N_CTX, VOCAB)
        head = load_mtp(place, target, N_CTX)
        pages = Pages(head.needs)
        results.append(pages.run(head.modules[0], torch.ones(3, 64), Span(0, [3, 4, 5], 0, 0, 3))[0])
    assert torch.equal(*results)
