"""The templates that `--chat-template` knows by name."""

from __future__ import annotations

from pathlib import Path

import pytest

from slipstream.engine.api import Chat
from slipstream.engine.errors import SettingError
from slipstream.engine.naming import CHAT_TEMPLATES
from slipstream.engine.service.start.given_template import with_given_template
from slipstream.engine.settings import Settings
from slipstream.engine.settings_check import check
from slipstream.engine.text.chat import ChatTemplate, load_chat_template
from slipstream.engine.text.named_templates import NAMED
from slipstream.engine.text.tokenizer import Tokenizer
from slipstream.engine.text.tokenizer_source import folder_source
from tests.unit.test_derived_formats import DEMO

TURNS = [
    {"role": "system", "content": " Be brief. "},
    {"role": "user", "content": " It's\n{x} "},
    {"role": "assistant", "content": " Yes. "},
    {"role": "user", "content": "Why?"},
]
# What the models' makers publish for these turns.
WRITTEN = {
    "chatml": "<|im_start|>system\n Be brief. <|im_end|>\n<|im_start|>user\n It's\n{x} <|im_end|>\n"
    "<|im_start|>assistant\n Yes. <|im_end|>\n<|im_start|>user\nWhy?<|im_end|>\n<|im_start|>assistant\n",
    "llama3": "<s><|start_header_id|>system<|end_header_id|>\n\nBe brief.<|eot_id|><|start_header_id|>user"
    "<|end_header_id|>\n\nIt's\n{x}<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\nYes.<|eot_id|><|start_header_id|>user"
    "<|end_header_id|>\n\nWhy?<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n",
    "gemma": "<s><start_of_turn>user\nBe brief.\n\nIt's\n{x}<end_of_turn>\n<start_of_turn>model\nYes.<end_of_turn>\n"
    "<start_of_turn>user\nWhy?<end_of_turn>\n<start_of_turn>model\n",
    "mistral-v7-tekken": "<s>[SYSTEM_PROMPT] Be brief. [/SYSTEM_PROMPT][INST] It's\n{x} [/INST] Yes. </s>"
    "[INST]Why?[/INST]",
}


def template_of(name: str, tokenizer: Tokenizer) -> ChatTemplate:
    settings = Settings(model=str(DEMO), chat_template=name)
    check(settings)
    found = load_chat_template(with_given_template(folder_source(DEMO), settings), tokenizer)
    assert found is not None
    return found


@pytest.mark.parametrize("name", CHAT_TEMPLATES)
def test_turns_in_their_order(name: str) -> None:
    tokenizer = Tokenizer(DEMO)
    if name != "chatml":
        tokenizer.special_tokens = {**tokenizer.special_tokens, "bos_token": "<s>"}
    else:
        tokenizer.special_tokens = {}
    template = template_of(name, tokenizer)
    shown = template.render(Chat(TURNS))
    assert shown == WRITTEN.get(name, shown)
    at = [shown.index(text) for text in ("Be brief.", "It's\n{x}", "Yes.", "Why?")]
    assert at == sorted(at)
    assert shown.endswith(NAMED[name].opening)
    closed = template.render(Chat(TURNS[:2], add_generation_prompt=False))
    assert closed == shown[: len(closed)]
    assert closed.endswith(NAMED[name].user[1])


def test_every_name_is_a_template() -> None:
    assert tuple(NAMED) == CHAT_TEMPLATES


def test_other_words_are_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingError, match=r"must be Jinja text or one of chatml, .*; did you mean chatml"):
        check(Settings(model=str(tmp_path), chat_template="chat-ml"))
