"""The demo's byte-level BPE of 4,096 tokens, with its chat template.

Identifiers are split off from the spaces around them, so a name has the same tokens wherever it stands.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

VOCAB_SIZE = 4096
END_OF_TEXT = "<|endoftext|>"
IM_START = "<|im_start|>"
IM_END = "<|im_end|>"
SPECIAL_TOKENS = [END_OF_TEXT, IM_START, IM_END]

KEYWORDS = """
def class return if elif else for while in is not and or as import from raise with yield assert except del
"""
# Keywords and punctuation take the spaces beside them, names never do; a newline takes the indentation.
PIECES = (
    rf" ?(?<!\w)(?:{'|'.join(KEYWORDS.split())}) ",
    r"_*\p{L}+",
    r"\p{N}",
    r"_+",
    r" ?[^\s\p{L}\p{N}_]+ ?",
    r"\n+ *",
    r" +",
    r"\s+",
)
# Without tools, what the demo models were trained on; with tools, the Hermes format. The models never learnt to call:
# under a grammar they can, and clients have something to talk to.
CHAT_TEMPLATE = (
    "{% if tools %}"
    "{{ '<|im_start|>system\\n' }}"
    "{% if messages[0]['role'] == 'system' %}{{ messages[0]['content'] + '\\n\\n' }}{% endif %}"
    "{{ 'You may call these functions:\\n<tools>\\n' }}"
    "{% for tool in tools %}{{ tool | tojson + '\\n' }}{% endfor %}"
    '{{ \'</tools>\\nA call is written as\\n<tool_call>\\n{"name": ..., "arguments": {...}}\\n</tool_call>\' }}'
    "{{ '<|im_end|>\\n' }}"
    "{% endif %}"
    "{% for message in messages %}"
    "{% if message['role'] == 'tool' %}"
    "{{ '<|im_start|>user\\n<tool_response>\\n' + message['content'] + '\\n</tool_response><|im_end|>\\n' }}"
    "{% elif message['tool_calls'] %}"
    "{{ '<|im_start|>assistant\\n' + (message['content'] or '') }}"
    "{% for call in message['tool_calls'] %}"
    "{% if message['content'] or not loop.first %}{{ '\\n' }}{% endif %}"
    "{{ '<tool_call>\\n{\"name\": \"' + call['function']['name'] + '\", \"arguments\": ' }}"
    "{{ call['function']['arguments'] | tojson + '}\\n</tool_call>' }}"
    "{% endfor %}"
    "{{ '<|im_end|>\\n' }}"
    "{% elif not (tools and loop.first and message['role'] == 'system') %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def train_tokenizer(texts: Iterable[str]) -> Tokenizer:
    """Learn the merges on the texts."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex("|".join(PIECES)), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json as transformers reads them."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": 8192,
        "bos_token": None,
        "eos_token": IM_END,
        "pad_token": END_OF_TEXT,
        "additional_special_tokens": [IM_START, IM_END],
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")


def render(messages: list[dict[str, str]]) -> str:
    """What the chat template gives, with the generation prompt."""
    turns = "".join(f"{IM_START}{turn['role']}\n{turn['content']}{IM_END}\n" for turn in messages)
    return f"{turns}{IM_START}assistant\n"


def encode_task(
    tokenizer: Tokenizer, messages: list[dict[str, str]], answer: str
) -> tuple[list[int], list[int]]:
    """The tokens of the prompt and of the answer with its end.

    They are encoded apart, as in serving: the prompt's last newline must not take the answer's indentation.
    """
    return list(tokenizer.encode(render(messages)).ids), list(tokenizer.encode(f"{answer}{IM_END}\n").ids)
