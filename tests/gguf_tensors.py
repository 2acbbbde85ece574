"""Tensors of checkpoint folders as GGUF files have them: ggml's names, and arranged as ggml's operators want them.

Made from what converters (llama.cpp's `conversion/`) mean by it, and apart from what undoes it here. Names of models'
layers are the `gguf` package's own.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Mapping
from typing import Any

import gguf
import torch
from torch import Tensor

Config = Mapping[str, Any]
Tensors = dict[str, Tensor]
Step = Callable[[Config, Tensors], Tensors]

EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(.*)")
NEXTN = re.compile(
    r"model\.layers\.(\d+)\.(eh_proj|enorm|hnorm|embed_tokens|shared_head\.norm|shared_head\.head)(\..*)"
)
# Of draft heads, which the package's table of names does not have yet.
HEAD_NAMES = {
    "fc": "fc",
    "d2t": "d2t",
    "norm": "output_norm",
    "embed_tokens": "token_embd",
    "lm_head": "output",
    "input_norm": "enc.output_norm",
    "hidden_norm": "enc.output_norm",
    "markov_head.markov_w1": "markov_w1",
    "markov_head.markov_w2": "markov_w2",
    "confidence_head.proj": "conf_proj",
}
HEAD_LAYER = re.compile(r"(?:midlayer|layers\.(\d+))\.(.*)")


def side_by_side(matrix: Tensor, n_heads: int) -> Tensor:
    """Rows that are rotated together, j and j + d_head / 2 of a head, as neighbours. [n_heads * d_head, ...]."""
    halves = matrix.view(n_heads, 2, -1, *matrix.shape[1:])  # [n_heads, 2, d_head / 2, ...]
    first, second = halves.unbind(1)  # [n_heads, d_head / 2, ...] each
    return torch.stack((first, second), 2).flatten(0, 2)


def rotated_in_pairs(config: Config, tensors: Tensors) -> Tensors:
    """Queries and keys for ggml's plain rotation."""
    heads = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}

    def change(name: str, tensor: Tensor) -> Tensor:
        key = heads.get(name.split(".")[-2]) if "." in name else None
        return tensor if key is None else side_by_side(tensor, config[key])

    return {name: change(name, tensor) for name, tensor in tensors.items()}


def norms_multiply(config: Config, tensors: Tensors) -> Tensors:
    """Norms as what a row is multiplied by, where transformers has what is added to 1."""

    def is_norm(name: str) -> bool:
        return name.endswith("norm.weight") and not name.endswith("linear_attn.norm.weight")

    return {name: 1 + one.float() if is_norm(name) else one for name, one in tensors.items()}


def round_robin(tensor: Tensor, config: Config, first: int = 0) -> Tensor:
    """Value heads, behind `first` rows left alone, such that the key heads they belong to repeat as a whole.

    tensor: [first + n_value_heads * d, ...].
    """
    n_key, n_value = config["linear_num_key_heads"], config["linear_num_value_heads"]
    heads = tensor[first:].reshape(n_value, -1, *tensor.shape[1:])  # [n_value_heads, d, ...]
    order = [key * (n_value // n_key) + turn for turn in range(n_value // n_key) for key in range(n_key)]
    return torch.cat((tensor[:first], heads[order].flatten(0, 1)))


def value_heads_repeat(config: Config, tensors: Tensors) -> Tensors:
    """Qwen3.5: rows, channels and columns of value heads."""
    n_keys = 2 * config["linear_num_key_heads"] * config["linear_key_head_dim"]
    changes: dict[str, Callable[[Tensor], Tensor]] = {
        "in_proj_qkv.weight": lambda one: round_robin(one, config, n_keys),
        "conv1d.weight": lambda one: round_robin(one, config, n_keys),
        "out_proj.weight": lambda one: round_robin(one.T, config).T,
        **dict.fromkeys(
            ("in_proj_z.weight", "in_proj_a.weight", "in_proj_b.weight", "A_log", "dt_bias"),
            lambda one: round_robin(one, config),
        ),
    }

    def change(name: str, tensor: Tensor) -> Tensor:
        _, is_inside, part = name.partition(".linear_attn.")
        return changes[part](tensor) if is_inside and part in changes else tensor

    return {name: change(name, tensor) for name, tensor in tensors.items()}


def ungrouped(config: Config, tensors: Tensors) -> Tensors:
    """Qwen3-Next: queries of all heads together, then keys, values, gates; transformers has those of one key head."""
    d_key = config["linear_key_head_dim"]
    n_groups, n_heads = config["linear_num_key_heads"], config["linear_num_value_heads"]
    d_values = n_heads // n_groups * config["linear_value_head_dim"]
    made: Tensors = {}
    for name, tensor in tensors.items():
        stem, found, _ = name.partition("in_proj_qkvz.weight")
        if not found:
            made[name] = tensor
            continue
        widths = [d_key, d_key, d_values, d_values]
        groups = [torch.split(group, widths) for group in tensor.chunk(n_groups)]
        parts = [torch.cat(apart) for apart in zip(*groups, strict=True)]
        made[f"{stem}in_proj_qkv.weight"] = torch.cat(parts[:3])
        made[f"{stem}in_proj_z.weight"] = parts[3]
    return made


def decays_and_kernels(config: Config, tensors: Tensors) -> Tensors:
    """Gated-delta layers: rates of decay themselves, kernels of a convolution without the empty dimension."""
    made: Tensors = {}
    for name, tensor in tensors.items():
        if name.endswith(".A_log"):
            made[name] = -torch.exp(tensor.float())
        elif name.endswith(".conv1d.weight"):
            made[name] = tensor[:, 0]
        else:
            made[name.replace(".dt_bias", ".dt_proj.bias")] = tensor
    return made


def kimi_delta(config: Config, tensors: Tensors) -> Tensors:
    """Kimi-Linear: rates of decay themselves, kernels of four dimensions, and released files' names."""
    mixtral = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
    made: Tensors = {}
    for name, tensor in tensors.items():
        if name.endswith(".A_log"):
            made[name] = -torch.exp(tensor.float())
        elif "_conv1d." in name:
            made[name] = tensor.reshape(1, len(tensor), 1, -1)
        elif (match := re.fullmatch(r"(.*\.experts\.\d+)\.(w\d)(\.weight)", name)) is not None:
            made[f"{match[1]}.{mixtral[match[2]]}{match[3]}".replace("block_sparse_moe", "mlp")] = tensor
        elif re.search(r"block_sparse_moe\.(gate|up|down)_proj", name):
            made[name.replace("block_sparse_moe", "mlp")] = tensor  # of dense layers
        else:
            made[name.replace(".dt_bias", ".dt_proj.bias")] = tensor
    return made


def nextn_after_layers(config: Config, tensors: Tensors) -> Tensors:
    """Qwen's prediction layers under the names of further layers of the model."""
    n_layers = config["num_hidden_layers"]
    ends = {
        "fc": "eh_proj",
        "pre_fc_norm_embedding": "enorm",
        "pre_fc_norm_hidden": "hnorm",
        "norm": "shared_head.norm",
    }

    def renamed(name: str) -> str:
        if (match := re.fullmatch(r"mtp\.layers\.(\d+)\.(.*)", name)) is not None:
            return f"model.layers.{n_layers + int(match[1])}.{match[2]}"
        if (match := re.fullmatch(r"mtp\.(\w+)\.weight", name)) is not None:
            return f"model.layers.{n_layers}.{ends[match[1]]}.weight"
        return name

    return {renamed(name): tensor for name, tensor in tensors.items()}


def experts_apart(config: Config, tensors: Tensors) -> Tensors:
    """gpt-oss: gates and ups, which alternate in transformers' tensor, apart; outputs before inputs."""
    made: Tensors = {}
    for name, tensor in tensors.items():
        stem, _, part = name.rpartition(".")
        if part in ("gate_up_proj", "gate_up_proj_bias"):
            ending = "bias" if part.endswith("_bias") else "weight"
            for first, one in enumerate(("gate", "up")):
                every_second = tensor[..., first::2]
                turned = every_second if ending == "bias" else every_second.transpose(1, 2)
                made[f"{stem}.{one}_proj.{ending}"] = turned
        elif part == "down_proj":
            made[f"{name}.weight"] = tensor.transpose(1, 2)
        elif part == "sinks":
            made[f"{name}.weight"] = tensor
        else:
            made[name.replace("down_proj_bias", "down_proj.bias")] = tensor
    return made


def stacked(config: Config, tensors: Tensors) -> Tensors:
    """The matrices of all experts of a layer as one tensor, [n_experts, ...]."""
    made: Tensors = {}
    experts: dict[str, dict[int, Tensor]] = {}
    for name, tensor in tensors.items():
        if (match := EXPERT.fullmatch(name)) is None:
            made[name.replace("e_score_correction_bias", "e_score_correction.bias")] = tensor
        else:
            experts.setdefault(f"{match[1]}.{match[3]}", {})[int(match[2])] = tensor
    return made | {name: torch.stack([each[i] for i in range(len(each))]) for name, each in experts.items()}


def heads_apart(config: Config, tensors: Tensors) -> Tensors:
    """Latent attention: each head's matrices of keys, turned, and of values."""
    made: Tensors = {}
    for name, tensor in tensors.items():
        stem, found, _ = name.partition("kv_b_proj.weight")
        if not found:
            made[name] = tensor
            continue
        heads = tensor.view(config["num_attention_heads"], -1, config["kv_lora_rank"])
        keys, values = heads.split([config["qk_nope_head_dim"], config["v_head_dim"]], 1)
        made |= {f"{stem}k_b_proj.weight": keys.transpose(1, 2), f"{stem}v_b_proj.weight": values}
    return made


def mimo2_layers(config: Config, tensors: Tensors) -> Tensors:
    """MiMo-V2-Flash: layers of prediction behind the model's, sinks as weights."""
    n_layers = config["num_hidden_layers"]

    def renamed(name: str) -> str:
        if (match := re.fullmatch(r"model\.mtp\.layers\.(\d+)\.(.*)", name)) is not None:
            name = f"model.layers.{n_layers + int(match[1])}.{match[2]}"
        if (match := re.fullmatch(r"model\.layers\.(\d+)\.final_layernorm(\..*)", name)) is not None:
            return f"blk.{match[1]}.layer_output_norm{match[2]}"
        return f"{name}.weight" if name.endswith("attention_sink_bias") else name

    return {renamed(name): tensor for name, tensor in tensors.items()}


def step35_layers(config: Config, tensors: Tensors) -> Tensors:
    """Step-3.5-Flash: norms as what a row is multiplied by, the bias for the choice under its own name."""
    ours = {
        "transformer.": "",
        "shared_head.output": "shared_head.head",
        "moe.router_bias": "moe.router_bias.bias",
    }
    made: Tensors = {}
    for name, tensor in tensors.items():
        for one, other in ours.items():
            name = name.replace(f".{one}", f".{other}")
        made[name] = 1 + tensor.float() if name.endswith("norm.weight") else tensor
    return made


def target_ids(config: Config, tensors: Tensors) -> Tensors:
    """Draft heads: the table of ids holds the target's ids themselves, and what only training needs is left out."""
    made = {name: tensor for name, tensor in tensors.items() if name != "t2d"}
    if "d2t" in made:
        made["d2t"] = made["d2t"].to(torch.int64) + torch.arange(len(made["d2t"]))
    return made


def scales_and_stacks(config: Config, tensors: Tensors) -> Tensors:
    """Gemma 4: factors of a layer and stacks of experts as weights, factors of experts beside their matrices."""
    scales = {"router.scale": "ffn_gate_inp.scale", "router.per_expert_scale": "ffn_down_exps.scale"}

    def renamed(name: str) -> str:
        if (match := re.fullmatch(r"model\.layers\.(\d+)\.(router\.\w*scale)", name)) is not None:
            return f"blk.{match[1]}.{scales[match[2]]}"
        is_weight = name.endswith(("layer_scalar", "experts.gate_up_proj", "experts.down_proj"))
        return f"{name}.weight" if is_weight else name

    return {renamed(name): tensor for name, tensor in tensors.items()}


def without_clusters(config: Config, tensors: Tensors) -> Tensors:
    """Gemma 4's assistant: converters leave clusters of tokens out. Its projections are no layer's."""
    return {
        f"nextn.{name}" if name.endswith("_projection.weight") else name: one
        for name, one in tensors.items()
        if not name.startswith("masked_embedding.")
    }


def full_heads(config: Config) -> Config:
    """Gemma 4: the heads of layers without a window, those of the others where nothing is said of them."""
    found: Config = next(iter(config["per_layer_config"].values()), config)
    return found


def standing_frequencies(config: Config) -> Tensor:
    """Gemma 4: 1 for frequencies of full layers that turn, and a huge divisor for the others, [d_head / 2] float32."""
    n = full_heads(config)["head_dim"] // 2
    n_turning = int(n * config["rope_parameters"]["full_attention"]["partial_rotary_factor"])
    return torch.tensor([1.0] * n_turning + [1e30] * (n - n_turning))


def frequency_divisors(config: Config) -> Tensor | None:
    """What frequencies are divided by beside the plain rotation, [d_head / 2] float32; None for nothing.

    Llama 3's scaling, and Gemma 4's rotation of a part.
    """
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if rope.get("full_attention", {}).get("rope_type") == "proportional":
        return standing_frequencies(config)
    if rope.get("rope_type") != "llama3":
        return None
    theta, d_head = rope.get("rope_theta") or config["rope_theta"][0], config["head_dim"]
    kinds = zip(config.get("layer_types", ()), config.get("partial_rotary_factors", ()), strict=False)
    share = next((share for kind, share in kinds if kind == "full_attention"), 1.0)
    divisors = llama3_divisors(rope, theta, int(d_head * share))
    return torch.cat((divisors, torch.ones(d_head // 2 - len(divisors))))


def llama3_divisors(rope: Config, theta: float, n_dims: int) -> Tensor:
    """Of n_dims that turn, [n_dims / 2] float32."""
    low, high, n_ctx = (
        rope["low_freq_factor"],
        rope["high_freq_factor"],
        rope["original_max_position_embeddings"],
    )
    divisors = []
    for i in range(0, n_dims, 2):
        turns = n_ctx * theta ** (-i / n_dims) / math.tau
        kept = min(
            1.0, max(0.0, (turns - low) / (high - low))
        )  # share of the frequency that is left as it is
        divisors.append(1 / (kept + (1 - kept) / rope["factor"]))
    return torch.tensor(divisors, dtype=torch.float32)


GATED_DELTA: tuple[Step, ...] = (nextn_after_layers, norms_multiply, stacked)
STEPS: Mapping[str, tuple[Step, ...]] = {
    "deepseek2": (heads_apart, stacked),
    "dflash": (target_ids,),
    "eagle3": (rotated_in_pairs, target_ids),
    "gemma3": (norms_multiply,),
    "gemma4": (scales_and_stacks,),
    "gemma4-assistant": (scales_and_stacks, without_clusters),
    "glm4moe": (stacked,),
    "gpt-oss": (experts_apart,),
    "kimi-linear": (kimi_delta, heads_apart, stacked),
    "llama": (rotated_in_pairs,),
    "step35": (step35_layers,),
    "mimo2": (mimo2_layers, stacked),
    "qwen2": (),
    "qwen3": (),
    "qwen3moe": (stacked,),
    "qwen35": (value_heads_repeat, decays_and_kernels, *GATED_DELTA),
    "qwen35moe": (value_heads_repeat, decays_and_kernels, *GATED_DELTA),
    "qwen3next": (ungrouped, decays_and_kernels, *GATED_DELTA),
}


@functools.cache
def name_table(architecture: gguf.MODEL_ARCH) -> gguf.TensorNameMap:
    """The package's names of the tensors of models of up to 64 layers."""
    return gguf.get_tensor_name_map(architecture, 64)


def translated(architecture: str, config: Config, tensors: Tensors) -> Tensors:
    """A folder's tensors by ggml's names, in ggml's arrangement."""
    for step in STEPS[architecture]:
        tensors = step(config, tensors)
    known = {name: one for one, name in gguf.MODEL_ARCH_NAMES.items()}.get(
        architecture.removesuffix("-assistant")
    )
    if known is None:
        return {head_name(name): tensor for name, tensor in tensors.items()}
    names = name_table(known)
    made = {model_name(name, names): tensor for name, tensor in tensors.items()}
    divisors = frequency_divisors(config)
    return made if divisors is None else {**made, "rope_freqs.weight": divisors}


def model_name(name: str, names: gguf.TensorNameMap) -> str:
    """A model's tensor by the package's table of names; those that have ggml's name already keep it."""
    if name.startswith(("blk.", "nextn.")):
        return name
    if (match := NEXTN.fullmatch(name)) is not None:
        return f"blk.{match[1]}.nextn.{match[2].replace('.', '_')}{match[3]}"
    found = names.get_name(name, (".weight", ".bias"))
    assert found is not None, name
    return found


def head_name(name: str) -> str:
    """A draft head's tensor."""
    if (match := HEAD_LAYER.fullmatch(name)) is None:
        stem, dot, ending = name.rpartition(".")
        return HEAD_NAMES[stem] + dot + ending if dot else HEAD_NAMES[name]
    number, rest = match[1] or "0", match[2]
    if rest == "hidden_norm.weight":
        return f"blk.{number}.attn_norm_2.weight"
    return model_name(f"model.layers.{number}.{rest}", name_table(gguf.MODEL_ARCH.QWEN3))
