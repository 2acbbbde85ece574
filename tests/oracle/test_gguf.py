"""GGUF files against the checkpoint folders they were written from: the same parts, the same bits of the logits."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from slipstream.engine.checkpoint import layouts
from slipstream.engine.checkpoint import weights as checkpoint_weights
from slipstream.engine.checkpoint.weights import Weights
from slipstream.engine.errors import LoadError
from slipstream.engine.layers.attention import AttentionSpec
from slipstream.engine.layers.decoder import DecoderSpec
from slipstream.engine.models.reading.documents import text_source
from slipstream.engine.models.registry import decoder_spec, load_network, read_model
from slipstream.engine.service.start.sizes import Checkpoint
from slipstream.engine.text.chat import load_chat_template
from slipstream.engine.text.tokenizer import Tokenizer
from slipstream.kernels.matmul.blocks import BlockWeight
from slipstream.kernels.matmul.quantized import JoinedWeight, widened
from tests.checkpoints import edited, tiny_checkpoint
from tests.gguf_files import Blocks, Contents, gguf_of
from tests.oracle.feeding import CPU, N_CTX, Runner, difference, loaded, rows
from tests.tiny_families import FAMILIES

ABOUT = ("engine/checkpoint/gguf/*.py",)
pytestmark = pytest.mark.usefixtures("_selected")
# What the format does not carry has the values that llama.cpp assumes.
CHANGES: Mapping[str, Mapping[str, Any]] = {
    "gemma3": {"query_pre_attn_scalar": 16},
    "gpt_oss": {"swiglu_limit": 7.0},
}
TEXT = [(7 * i + i * i) % 384 for i in range(80)]  # past the original context of 64 of scaled rotations
# Those whose converters read the configs that transformers writes; the others' have tests of their own.
BESIDE_TOWERS = {"qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "mistral3", "mistral3 of ministral3", "ministral3"}
IN_GGUF = FAMILIES.keys() - {"mimo_v2_flash", "step3p7"} - BESIDE_TOWERS
# Those whose products in float32 the kernels' tests compile too; all others are tested there in bfloat16.
BLOCK_KINDS = ("Q4_1", "Q8_0", "Q4_K", "Q6_K")


def reversible(tensors: dict[str, Tensor]) -> None:
    """Change rates of decay to numbers whose exponential leads back to them, to the bit. Norms do so as they are."""
    for name, tensor in tensors.items():
        if name.endswith("A_log"):
            for _ in range(8):
                tensor = torch.log(torch.exp(tensor))
            assert torch.equal(torch.log(torch.exp(tensor)), tensor)
            tensors[name] = tensor


@pytest.fixture(scope="module")
def folder_for(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A family's tiny checkpoint, of numbers that a GGUF file can give back to the bit; made once."""
    made: dict[str, Path] = {}

    def get(family: str) -> Path:
        if family not in made:
            scratch = tmp_path_factory.mktemp(family)
            tiny_checkpoint(family, scratch / "as_drawn", changes=CHANGES.get(family))
            made[family] = edited(scratch / "as_drawn", scratch / family, reversible)
        return made[family]

    return get


def logits(path: Path, dtype: torch.dtype = torch.float32) -> Tensor:
    """Of all rows of the text, [80, 384]."""
    return Runner(loaded(path, dtype)).feed(rows(0, TEXT, 0, len(TEXT)))


def parts(path: Path) -> DecoderSpec:
    return decoder_spec(read_model(path), N_CTX, 384)


def same_parts(path: Path, other: Path) -> bool:
    """Field for field but for functions, which do not compare as equal."""
    ours, theirs = (re.sub(r" at 0x[0-9a-f]+", "", repr(parts(one))) for one in (path, other))
    return ours == theirs


# --- whole models --------------------------------------------------------------------------------------------


@pytest.mark.sampled(keep=6)
@pytest.mark.parametrize("family", sorted(IN_GGUF - {"llama"}))
def test_a_file_is_the_folder_it_was_made_of(
    folder_for: Callable[[str], Path], tmp_path: Path, family: str
) -> None:
    folder = folder_for(family)
    path = gguf_of(folder).write(tmp_path / "model.gguf")
    assert same_parts(path, folder)
    assert read_model(path).dtype == torch.float32
    ours, theirs = loaded(path), loaded(folder)
    assert (ours.n_params, ours.weight_bytes) == (theirs.n_params, theirs.weight_bytes)
    expected = logits(folder)
    assert expected.std() > 0.3, "logits must be large enough to show a difference"
    assert torch.equal(logits(path), expected)


def test_llamas_scaled_rotation_comes_as_divisors(folder_for: Callable[[str], Path], tmp_path: Path) -> None:
    folder = folder_for("llama")
    path = gguf_of(folder).write(tmp_path / "model.gguf")
    rope = read_model(path).rope
    assert (rope.kind, rope.theta, rope.n_dims, len(rope.divisors)) == ("divided", 5e5, 16, 8)
    assert (rope.divisors[0], rope.divisors[-1]) == (1.0, 8.0)
    assert any(1 < one < 8 for one in rope.divisors), "the branch in between must matter"
    ours, theirs = parts(path), parts(folder)
    assert str(rope) in repr(ours)
    assert repr(ours).replace(str(rope), "") == repr(theirs).replace(str(read_model(folder).rope), "")
    assert difference(logits(path), logits(folder)) < 1e-4
    plain = gguf_of(folder).with_tensors({"rope_freqs.weight": None}).write(tmp_path / "plain.gguf")
    assert difference(logits(plain), logits(folder)) > 0.01


def test_yarn_and_linear_scaling(tmp_path: Path) -> None:
    yarn = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}
    for rope in (yarn, {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}):
        scratch = tmp_path / str(rope["rope_type"])
        folder = tiny_checkpoint("qwen3", scratch, changes={"rope_parameters": rope})
        path = gguf_of(folder).write(scratch / "model.gguf")
        assert same_parts(path, folder)
        assert torch.equal(logits(path), logits(folder))


def test_rates_of_decay_as_they_were_drawn(tmp_path: Path) -> None:
    """They are stored as exponentials, which round."""
    folder = tiny_checkpoint("qwen3_next", tmp_path)
    assert difference(logits(gguf_of(folder).write(tmp_path / "model.gguf")), logits(folder)) < 1e-4


def test_parts_of_a_split_model(folder_for: Callable[[str], Path], tmp_path: Path) -> None:
    contents = gguf_of(folder_for("qwen3_moe"))
    first = contents.write(tmp_path / "model.gguf", most_tensors=20)
    assert len(list(tmp_path.glob("*.gguf"))) == 3
    assert first.name == "model-00001-of-00003.gguf"
    assert torch.equal(logits(first), logits(folder_for("qwen3_moe")))


def test_layers_that_slide_are_listed_or_every_second(
    folder_for: Callable[[str], Path], tmp_path: Path
) -> None:
    contents = gguf_of(folder_for("gemma3"))
    slides = [False, True, True, False, True, True, True]
    listed = contents.with_keys({".attention.sliding_window_pattern": slides}).write(tmp_path / "listed.gguf")
    assert [one is not None for one in read_model(listed).windows] == slides[:6]
    full = contents.with_keys({".attention.sliding_window": None}).write(tmp_path / "full.gguf")
    assert read_model(full).windows == [None] * 6
    usual = gguf_of(folder_for("gpt_oss")).write(tmp_path / "usual.gguf")
    assert read_model(usual).windows == [16, None, 16, None]


def test_which_layers_are_recurrent(folder_for: Callable[[str], Path], tmp_path: Path) -> None:
    """Files of before the list say every which is full."""
    contents = gguf_of(folder_for("qwen3_5"))
    keys = {".attention.recurrent_layers": None, ".full_attention_interval": 3}
    path = contents.with_keys(keys).write(tmp_path / "interval.gguf")
    assert torch.equal(logits(path), logits(folder_for("qwen3_5")))


def scales(path: Path) -> set[float | None]:
    """What queries are multiplied by, over all layers."""
    return {one.mixer.scale for one in parts(path).blocks if isinstance(one.mixer, AttentionSpec)}


def test_the_largest_gemma_scales_its_queries_by_another_width(
    folder_for: Callable[[str], Path], tmp_path: Path
) -> None:
    contents = gguf_of(folder_for("gemma3"))
    path = contents.with_keys({".block_count": 62, ".attention.head_count": 2}).write(tmp_path / "27b.gguf")
    assert scales(path) == {32**-0.5}
    small = contents.with_keys({".attention.head_count": 2}).write(tmp_path / "small.gguf")
    assert scales(small) == {16**-0.5}


def test_text_and_defaults_of_sampling(folder_for: Callable[[str], Path], tmp_path: Path) -> None:
    folder = folder_for("qwen2")
    sampling = {"general.sampling.temp": 0.75, "general.sampling.top_k": 20, "general.sampling.top_p": 0.5}
    more = {"general.sampling.min_p": 0.25, "general.sampling.penalty_repeat": 1.5}
    more |= {"tokenizer.ggml.suppress_tokens": [7, 300]}
    path = gguf_of(folder).with_keys(sampling | more).write(tmp_path / "model.gguf")
    assert read_model(path).suppressed == (7, 300)
    expected = {"temperature": 0.75, "top_k": 20, "top_p": 0.5, "min_p": 0.25, "repeat_penalty": 1.5}
    assert read_model(path).sampling == expected
    assert read_model(gguf_of(folder).write(path)).sampling == {}
    source = text_source(path)
    ours, theirs = Tokenizer(source), Tokenizer(folder)
    text = "The quick brown fox <|im_end|> Größe, 漢字 and 😀"
    assert ours.encode(text) == theirs.encode(text)
    assert (ours.eos_ids, ours.vocab_size) == (theirs.eos_ids, theirs.vocab_size)
    template, other = load_chat_template(source, ours), load_chat_template(folder, theirs)
    assert template is not None
    assert other is not None
    assert template.source == other.source


# --- types of tensors ----------------------------------------------------------------------------------------


@pytest.mark.sampled(keep=6)
@pytest.mark.parametrize("kind", ["F16", "BF16"])
@pytest.mark.parametrize("family", ["llama", "qwen3_next"])
def test_narrow_plain_numbers(
    folder_for: Callable[[str], Path], tmp_path: Path, family: str, kind: str
) -> None:
    """As they are stored, in whatever dtype they are computed with."""
    contents = gguf_of(folder_for(family)).as_type(kind)
    path = contents.write(tmp_path / "narrow.gguf")
    wide = contents.widened().write(tmp_path / "wide.gguf")
    assert read_model(path).dtype == torch.bfloat16
    assert read_model(path).quantization is None
    assert torch.equal(logits(path), logits(wide))
    assert torch.equal(logits(path, torch.bfloat16), logits(wide, torch.bfloat16))
    assert not torch.equal(logits(path), logits(folder_for(family)))  # rounding was lossy, so it was read


def near(ours: Tensor, expected: Tensor) -> bool:
    """Within the rounding of products that are summed in another order."""
    return float((ours - expected).abs().max()) < 1e-4 * float(expected.abs().max())


def check_blocks(contents: Contents, tmp_path: Path) -> None:
    """A file in block types against one of the values that they mean."""
    path, wide = contents.write(tmp_path / "blocks.gguf"), contents.widened().write(tmp_path / "wide.gguf")
    config = read_model(path)
    assert config.dtype == torch.bfloat16
    assert config.quantization is not None
    assert same_parts(path, wide)
    assert near(logits(path), logits(wide))


@pytest.mark.sampled(keep=6)
@pytest.mark.parametrize("family", sorted(IN_GGUF))
def test_blocks_of_every_family(folder_for: Callable[[str], Path], tmp_path: Path, family: str) -> None:
    """Rows and columns are rearranged without a look into blocks."""
    contents = gguf_of(folder_for(family)).as_type("Q4_0")
    check_blocks(contents, tmp_path)
    assert not near(logits(tmp_path / "blocks.gguf"), logits(folder_for(family)))


@pytest.fixture(scope="module")
def wide_rows(tmp_path_factory: pytest.TempPathFactory) -> Contents:
    """A model whose matrices have rows of 256 inputs, as blocks of K types are."""
    changes = {
        "num_hidden_layers": 1,
        "hidden_size": 256,
        "intermediate_size": 256,
        "head_dim": 64,
        "tie_word_embeddings": False,
    }
    return gguf_of(tiny_checkpoint("qwen3", tmp_path_factory.mktemp("wide"), changes=changes))


@pytest.mark.parametrize("kind", BLOCK_KINDS)
def test_types_of_blocks(wide_rows: Contents, tmp_path: Path, kind: str) -> None:
    check_blocks(wide_rows.as_type(kind), tmp_path)


def test_types_mixed_within_a_projection(wide_rows: Contents, tmp_path: Path) -> None:
    """As in files of the type Q4_K_M, and with a part in plain numbers."""
    fine, coarse = wide_rows.as_type("Q6_K"), wide_rows.as_type("Q4_K")
    mixed = {name: fine.tensors[f"blk.0.{name}.weight"] for name in ("attn_v", "ffn_down")}
    mixed |= {"ffn_up": wide_rows.tensors["blk.0.ffn_up.weight"]}
    contents = coarse.with_tensors({f"blk.0.{name}.weight": one for name, one in mixed.items()})
    check_blocks(contents, tmp_path)


def test_tied_embeddings_in_blocks(folder_for: Callable[[str], Path], tmp_path: Path) -> None:
    contents = gguf_of(folder_for("qwen3")).as_type("Q8_0")
    path = contents.write(tmp_path / "model.gguf")
    stored, network = contents.tensors["token_embd.weight"], loaded(path)
    assert isinstance(stored, Blocks)
    assert isinstance(network.decoder.embedding.weight, BlockWeight)
    assert torch.equal(network.decoder.embedding(torch.tensor([0, 383, 7])), stored.values()[[0, 383, 7]])
    assert torch.equal(widened(network.decoder.embedding.weight), stored.values())
    plain = gguf_of(folder_for("qwen3")).as_type("Q8_0", embeddings=False).write(tmp_path / "plain.gguf")
    assert isinstance(loaded(plain).decoder.embedding.weight, Tensor)


@pytest.mark.parametrize("family", ["qwen3", "qwen3_5", "gpt_oss"])
def test_what_a_file_takes_of_memory_is_known_before(
    folder_for: Callable[[str], Path], tmp_path: Path, family: str
) -> None:
    path = gguf_of(folder_for(family)).as_type("Q8_0").write(tmp_path / "model.gguf")
    config = read_model(path)
    for dtype in (torch.float32, torch.bfloat16):
        network = load_network(path, dtype, CPU, N_CTX)
        assert Checkpoint(path, config, CPU, dtype).outline.weight_bytes == network.weight_bytes


def test_the_log_says_that_a_file_is_quantised(
    folder_for: Callable[[str], Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = gguf_of(folder_for("qwen3")).as_type("Q4_0").write(tmp_path / "model.gguf")
    with caplog.at_level(logging.INFO, "slipstream.engine.models.registry"):
        loaded(path)
    assert [one.getMessage() for one in caplog.records] == [
        f"quantised weights model={path} method=gguf Q4_0=29"
    ]


@pytest.mark.parametrize("family", ["glm4_moe", "deepseek_v3"])
def test_a_scale_of_nought_leaves_experts_as_they_are(
    folder_for: Callable[[str], Path], tmp_path: Path, family: str
) -> None:
    """As in llama.cpp."""
    contents = gguf_of(folder_for(family))
    paths = [
        contents.with_keys({".expert_weights_scale": value}).write(tmp_path / f"{value}.gguf")
        for value in (0.0, 1.0)
    ]
    assert same_parts(*paths)


@pytest.mark.parametrize("family", ["glm4_moe", "deepseek_v3"])
def test_weights_of_experts_are_summed_to_1_only_where_a_file_says_so(
    folder_for: Callable[[str], Path], tmp_path: Path, family: str
) -> None:
    """As in llama.cpp."""
    contents = gguf_of(folder_for(family))
    silent, refusing, asking = (
        contents.with_keys({".expert_weights_norm": value}).write(tmp_path / f"{value}.gguf")
        for value in (None, False, True)
    )
    assert same_parts(silent, refusing)
    assert not same_parts(silent, asking)


def test_latent_attention_in_older_files(tmp_path: Path) -> None:
    """Before keys and values of each head were apart, and before the file said how experts are scored."""
    folder = tiny_checkpoint("glm4_moe_lite", tmp_path / "folder")
    newer = gguf_of(folder)
    joined = load_file(folder / "model.safetensors")
    changes: dict[str, Any] = {}
    for i in range(4):
        changes |= {f"blk.{i}.attn_k_b.weight": None, f"blk.{i}.attn_v_b.weight": None}
        changes[f"blk.{i}.attn_kv_b.weight"] = joined[f"model.layers.{i}.self_attn.kv_b_proj.weight"]
    keys = {
        ".expert_gating_func": None,
        ".attention.key_length_mla": None,
        ".attention.value_length_mla": None,
        ".attention.key_length": 48,
        ".attention.value_length": 24,
    }
    older = newer.with_tensors(changes).with_keys(keys)
    configs = [read_model(one.write(tmp_path / f"{i}.gguf")) for i, one in enumerate((newer, older))]
    assert configs[0] == configs[1]
    span = rows(0, list(range(5, 45)), 0, 40)
    one, other = (Runner(loaded(tmp_path / f"{i}.gguf")).feed(span) for i in range(2))
    assert torch.equal(one, other)
    softmax = newer.with_keys({".expert_gating_func": 1}).write(tmp_path / "softmax.gguf")
    assert read_model(softmax).architecture == "DeepseekV2ForCausalLM"


@pytest.mark.parametrize(
    ("keys", "tensors", "message"),
    [
        ({".expert_gating_func": 3}, {}, r"deepseek2\.expert_gating_func = 3: only 1, a softmax"),
        (
            {},
            {"blk.1.attn_k_b.weight": torch.ones(4, 32)},
            r"attn_k_b\.weight.*must be a matrix for each head",
        ),
        (
            {},
            {"blk.1.attn_v_b.weight": torch.ones(3, 24, 32)},
            r"attn_v_b\.weight.*must be a matrix for each head",
        ),
        ({}, {"blk.1.attn_v_b.weight": torch.ones(4, 24, 31)}, r"attn_v_b\.weight.*must end in 32"),
        ({}, {"blk.1.attn_k_b.weight": None}, r"missing: .*blk\.1\.attn_k(v)?_b"),
    ],
)
def test_latent_attention_that_does_not_fit_is_refused(
    keys: dict[str, Any], tensors: dict[str, Any], message: str, tmp_path: Path
) -> None:
    whole = gguf_of(tiny_checkpoint("glm4_moe_lite", tmp_path / "folder"))
    with pytest.raises(LoadError, match=message):
        loaded(whole.with_keys(keys).with_tensors(tensors).write(tmp_path / "changed.gguf"))


def test_matrices_stay_in_blocks_on_a_device_that_multiplies_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A device without memory stands for a GPU, whose products read this type and another not."""
    folder = tiny_checkpoint("llama", tmp_path)
    device, held = torch.device("meta"), {"Q8_0"}
    for module in (layouts, checkpoint_weights):
        monkeypatch.setattr(module, "stays_narrow", lambda matrix, device: matrix.kind in held)
    kinds = {}
    for kind in ("Q8_0", "Q4_1"):
        gguf_of(folder).as_type(kind).write(tmp_path / f"{kind}.gguf")
        weights = Weights(tmp_path / f"{kind}.gguf", torch.bfloat16, device)
        rows = weights.take_matrix("model.embed_tokens.weight", (384, 64))
        tied = weights.take_tied("model.embed_tokens", rows)
        head = weights.take_matrix("lm_head.weight", (384, 64), for_rows=False)
        joint = weights.take_linear(
            [f"model.layers.0.mlp.{one}_proj" for one in ("gate", "up")], 64, [128, 128]
        )
        assert isinstance(rows, Tensor)
        assert {one.device for one in (rows, tied, head, joint)} == {device}
        kinds[kind] = [type(one) for one in (tied, head, joint)]
    assert kinds == {"Q8_0": [BlockWeight, BlockWeight, JoinedWeight], "Q4_1": [Tensor] * 3}
