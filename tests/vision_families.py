"""Configs of tiny models that see images, one per family, in which every part of the family matters."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import transformers as hf
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil
from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from tests.tiny_families import EXPERTS, FULL, HYBRID, SLIDING
from tests.vision_templates import GEMMA3, GEMMA4, MISTRAL, QWEN

VOCAB = 384
QWEN_CONTROL = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
GEMMA3_CONTROL = (
    "<pad>",
    "<eos>",
    "<bos>",
    "<start_of_turn>",
    "<end_of_turn>",
    "<start_of_image>",
    "<end_of_image>",
    "<image_soft_token>",
)
GEMMA4_CONTROL = (
    "<pad>",
    "<eos>",
    "<bos>",
    "<|turn>",
    "<turn|>",
    "<|image>",
    "<image|>",
    "<|image|>",
    "<|video|>",
    "<|audio|>",
)
MISTRAL_CONTROL = (
    "<unk>",
    "<s>",
    "</s>",
    "[SYSTEM_PROMPT]",
    "[/SYSTEM_PROMPT]",
    "[INST]",
    "[/INST]",
    "[IMG]",
    "[IMG_BREAK]",
    "[IMG_END]",
    "<pad>",
)
QWEN_IDS = {
    "image_token_id": QWEN_CONTROL.index("<|image_pad|>"),
    "video_token_id": QWEN_CONTROL.index("<|video_pad|>"),
    "vision_start_token_id": QWEN_CONTROL.index("<|vision_start|>"),
    "vision_end_token_id": QWEN_CONTROL.index("<|vision_end|>"),
}


@dataclass(frozen=True, slots=True)
class TinyVision:
    """What a family's tiny checkpoint is made of."""

    model: Any  # transformers' class
    config: Callable[..., Any]  # of text fields, and `vision` and `outer` ones
    processor: Callable[[], Any]  # the image processor
    control: tuple[str, ...]  # control tokens, ids from 0
    template: str
    special: Mapping[str, str]  # roles of control tokens, as tokenizer_config.json has them
    file: str = "preprocessor_config.json"  # that says how images are prepared
    text: Mapping[str, Any] = field(default_factory=dict)
    vision: Mapping[str, Any] = field(default_factory=dict)
    outer: Mapping[str, Any] = field(default_factory=dict)
    processing: Mapping[str, Any] = field(default_factory=dict)  # the rest of processor_config.json


QWEN_VISION = {
    "depth": 3,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 2,
    "patch_size": 4,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "out_hidden_size": 64,
}
QWEN_PROCESSOR = partial(
    Qwen2VLImageProcessorPil,
    patch_size=4,
    merge_size=2,
    temporal_patch_size=2,
    size={"shortest_edge": 4 * 64, "longest_edge": 40 * 64},
)
QWEN_SPECIAL = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
GEMMA_SPECIAL = {"bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>"}
SECTIONS_INTERLEAVED = {"mrope_interleaved": True, "mrope_section": [6, 5, 5]}
POSITIONS_OF_QWEN3 = {"num_position_embeddings": 16, "deepstack_visual_indexes": [0, 2]}
QWEN3_VL_TEXT = {
    "head_dim": 32,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, **SECTIONS_INTERLEAVED},
}
GEMMA3_TEXT = {
    "num_hidden_layers": 6,
    "head_dim": 16,
    "query_pre_attn_scalar": 24,
    "sliding_window": 8,  # less than an image
    "layer_types": [SLIDING, SLIDING, FULL, SLIDING, SLIDING, FULL],
    "rope_parameters": {
        SLIDING: {"rope_type": "default", "rope_theta": 1e4},
        FULL: {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
    },
}
GEMMA4_TEXT = {
    "num_hidden_layers": 6,
    "head_dim": 16,
    "global_head_dim": 32,
    "num_key_value_heads": 1,
    "sliding_window": 16,  # less than an image
    "layer_types": [SLIDING, FULL] * 3,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": VOCAB,
    "num_kv_shared_layers": 2,
    "use_double_wide_mlp": True,
    "final_logit_softcapping": 3.0,
}
GEMMA4_VISION = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "patch_size": 4,
    "pooling_kernel_size": 2,
    "position_embedding_size": 192,
}


def config_of(kind: Any, text: Any, vision: Any, outer: Any, *, vision_type: str | None = None) -> Any:
    """A wrapper's config: the text's and the vision's fields as dicts in it."""
    typed = {"model_type": vision_type} if vision_type else {}
    return kind(text_config=dict(text), vision_config={**vision, **typed}, **outer)


TINY: dict[str, TinyVision] = {
    "qwen2_5_vl": TinyVision(
        hf.Qwen2_5_VLForConditionalGeneration,
        partial(config_of, hf.Qwen2_5_VLConfig),
        QWEN_PROCESSOR,
        QWEN_CONTROL,
        QWEN,
        QWEN_SPECIAL,
        text={"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}},
        vision={**QWEN_VISION, "window_size": 16, "fullatt_block_indexes": [1]},
        outer=QWEN_IDS,
    ),
    "qwen3_vl": TinyVision(
        hf.Qwen3VLForConditionalGeneration,
        partial(config_of, hf.Qwen3VLConfig),
        QWEN_PROCESSOR,
        QWEN_CONTROL,
        QWEN,
        QWEN_SPECIAL,
        text=QWEN3_VL_TEXT,
        vision={**QWEN_VISION, **POSITIONS_OF_QWEN3},
        outer=QWEN_IDS,
    ),
    "qwen3_vl_moe": TinyVision(
        hf.Qwen3VLMoeForConditionalGeneration,
        partial(config_of, hf.Qwen3VLMoeConfig),
        QWEN_PROCESSOR,
        QWEN_CONTROL,
        QWEN,
        QWEN_SPECIAL,
        text={
            **QWEN3_VL_TEXT,
            **{key: EXPERTS[key] for key in ("num_experts", "num_experts_per_tok", "moe_intermediate_size")},
        },
        vision={**QWEN_VISION, **POSITIONS_OF_QWEN3},
        outer=QWEN_IDS,
    ),
    "qwen3_5": TinyVision(
        hf.Qwen3_5ForConditionalGeneration,
        partial(config_of, hf.Qwen3_5Config),
        QWEN_PROCESSOR,
        QWEN_CONTROL,
        QWEN,
        QWEN_SPECIAL,
        text={
            **HYBRID,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1e4,
                "partial_rotary_factor": 0.5,
                "mrope_interleaved": True,
                "mrope_section": [3, 3, 2],
            },
        },
        vision={**QWEN_VISION, "num_position_embeddings": 16},
        outer=QWEN_IDS,
    ),
    "gemma3": TinyVision(
        hf.Gemma3ForConditionalGeneration,
        partial(config_of, hf.Gemma3Config, vision_type="siglip_vision_model"),
        partial(Gemma3ImageProcessorPil, size={"height": 48, "width": 48}),
        GEMMA3_CONTROL,
        GEMMA3,
        {
            **GEMMA_SPECIAL,
            "boi_token": "<start_of_image>",
            "eoi_token": "<end_of_image>",
            "image_token": "<image_soft_token>",
        },
        text=GEMMA3_TEXT,
        vision={
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "image_size": 48,
            "patch_size": 4,
            "vision_use_head": False,
        },
        outer={
            "mm_tokens_per_image": 16,
            "boi_token_index": GEMMA3_CONTROL.index("<start_of_image>"),
            "eoi_token_index": GEMMA3_CONTROL.index("<end_of_image>"),
            "image_token_index": GEMMA3_CONTROL.index("<image_soft_token>"),
        },
        processing={"image_seq_length": 16},
    ),
    "gemma4": TinyVision(
        hf.Gemma4ForConditionalGeneration,
        partial(config_of, hf.Gemma4Config),
        partial(Gemma4ImageProcessorPil, patch_size=4, pooling_kernel_size=2, max_soft_tokens=70),
        GEMMA4_CONTROL,
        GEMMA4,
        {
            **GEMMA_SPECIAL,
            "boi_token": "<|image>",
            "eoi_token": "<image|>",
            "image_token": "<|image|>",
        },
        file="processor_config.json",
        text={**GEMMA4_TEXT, "use_bidirectional_attention": None},
        vision={**GEMMA4_VISION, "use_clipped_linears": True},
        outer={
            "audio_config": None,
            "boi_token_id": GEMMA4_CONTROL.index("<|image>"),
            "eoi_token_id": GEMMA4_CONTROL.index("<image|>"),
            "image_token_id": GEMMA4_CONTROL.index("<|image|>"),
            "video_token_id": GEMMA4_CONTROL.index("<|video|>"),
            "audio_token_id": GEMMA4_CONTROL.index("<|audio|>"),
        },
        processing={"image_seq_length": 70},
    ),
    "mistral3": TinyVision(
        hf.Mistral3ForConditionalGeneration,
        partial(config_of, hf.Mistral3Config, vision_type="pixtral"),
        partial(PixtralImageProcessorPil, size={"longest_edge": 48}, patch_size=4),
        MISTRAL_CONTROL,
        MISTRAL,
        {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"},
        text={
            "model_type": "mistral",
            "head_dim": 16,
            "sliding_window": None,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
        },
        vision={
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "image_size": 48,
            "patch_size": 4,
        },
        outer={
            "image_token_index": MISTRAL_CONTROL.index("[IMG]"),
            "spatial_merge_size": 2,
            "vision_feature_layer": -1,
            "tie_word_embeddings": False,
        },
        processing={
            "patch_size": 4,
            "spatial_merge_size": 2,
            "image_token": "[IMG]",
            "image_break_token": "[IMG_BREAK]",
            "image_end_token": "[IMG_END]",
        },
    ),
}
