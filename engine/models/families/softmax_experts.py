"""What the families with softmax routing read of their configs: Qwen3-MoE, Qwen3-VL-MoE, Qwen3-Next, Qwen3.5-MoE."""

from __future__ import annotations

from slipstream.engine.layers.decoder import FeedForwardSpec
from slipstream.engine.layers.mlp import MLPSpec
from slipstream.engine.layers.moe import MoESpec, SharedSpec
from slipstream.engine.models.reading.config import ModelConfig
from slipstream.kernels.moe.op import Routing


def read_experts(
    config: ModelConfig, *, normed: bool, always: bool = False, shared: SharedSpec | None = None
) -> MoESpec:
    """The mixture of experts. normed: whether weights sum to 1 if the config does not say.

    always: they do in transformers whatever the config says, so that one that says otherwise, which vLLM obeys, is
    refused. Raises `UnsupportedModel` naming key and value.
    """
    fields = config.fields
    of_all = "num_experts" if fields.has("num_experts") else "num_local_experts"
    n_experts, top_k = fields.experts(of_all, "num_experts_per_tok")
    is_normed = fields.flag("norm_topk_prob", default=normed)
    if always and not is_normed:
        raise fields.refuse("norm_topk_prob", "must be true, as transformers has it whatever it says")
    return MoESpec(
        d_model=config.d_model,
        d_ffn=fields.count("moe_intermediate_size"),
        n_experts=n_experts,
        routing=Routing(top_k=top_k, scores="softmax", normed=is_normed),
        shared=shared,
    )


def feed_forwards(config: ModelConfig, experts: MoESpec) -> list[FeedForwardSpec]:
    """Each layer's feed-forward part: every `decoder_sparse_step`-th has experts but those in `mlp_only_layers`."""
    fields, n_layers, dense = config.fields, config.n_layers, MLPSpec(config.d_model, config.d_ffn)
    step, only = fields.count("decoder_sparse_step", 1), fields.values.get("mlp_only_layers") or []
    if not isinstance(only, list) or not all(type(one) is int and 0 <= one < n_layers for one in only):
        raise fields.refuse("mlp_only_layers", f"must be a list of layers below {n_layers}")
    return [dense if (i + 1) % step or i in only else experts for i in range(n_layers)]
