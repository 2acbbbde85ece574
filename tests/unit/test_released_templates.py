"""Released chat templates, of which none is copied here: how many show calls that can be read.

CHAT_TEMPLATES names a folder of them, NAME.jinja each, such as `models/templates` of llama.cpp, which is also in the
source distribution of llama-cpp-python:

    CHAT_TEMPLATES=llama.cpp/models/templates python -m pytest -m slow tests/unit/test_released_templates.py
"""

from __future__ import annotations

import os
import re
from dataclasses import replace
from pathlib import Path

import pytest

from slipstream.engine.api import Chat
from slipstream.engine.errors import InvalidRequest
from slipstream.engine.text.chat import ChatTemplate
from slipstream.engine.text.tokenizer import Tokenizer
from slipstream.server.openai.formats.derived import derived, is_proved
from slipstream.server.openai.formats.known import format_of
from tests.http.fake import INFO
from tests.unit.test_call_turns import ASKED, RESULT, TOOLS, called
from tests.unit.test_derived_formats import DEMO, rendered

FOLDER = os.environ.get("CHAT_TEMPLATES")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(FOLDER is None, reason="CHAT_TEMPLATES names no folder of templates"),
]
NO_PROOF = ("harmony", "llama3")  # read in another way than by `Parser` from a turn with its header
BY_HAND = (*NO_PROOF, "gemma4")  # cannot be derived
# By format, the templates of llama-cpp-python 0.3.36; all that are not named here are of a family.
DERIVED = """
Apertus-8B-Instruct Apriel-1.6-15b-Thinker-fixed ByteDance-Seed-OSS Cohere2MoE GigaChat3-10B-A1.8B
CohereForAI-c4ai-command-r7b-12-2024-tool_use GigaChat3.1-10B-A1.8B Kimi-K3 MiniMax-M1 MiniMax-M2
NVIDIA-Nemotron-Nano-v2 deepseek-ai-DeepSeek-V3.2 deepseek-ai-DeepSeek-V4 deepseek-ai-DeepSeek-V4-Flash-0731
meetkai-functionary-medium-v3.1 moonshotai-Kimi-K2 openbmb-MiniCPM5-1B tencent-Hy3 unsloth-Apriel-1.5
upstage-Solar-Open-100B
"""
# No place for tools, or no calls shown; or calls in a way of their own (MiniMax-M3, LFM2.5, muse); or the
# template fails on calls as objects (functionary 3.2), on lists that grow (Kimi-K2-Instruct, -Thinking), or on objects
# in tools (Command R+).
GENERIC = """
CohereForAI-c4ai-command-r-plus-tool_use HuggingFaceTB-SmolLM3-3B Kimi-K2-Instruct Kimi-K2-Thinking LFM2-8B-A1B
LFM2.5-8B-A1B LFM2.5-Instruct MiniMax-M3 deepseek-ai-DeepSeek-R1-Distill-Llama-8B
deepseek-ai-DeepSeek-R1-Distill-Qwen-32B deepseek-ai-DeepSeek-V3.1 fireworks-ai-llama-3-firefunction-v2
google-gemma-2-2b-it ibm-granite-granite-3.3-2B-Instruct
llama-cpp-rwkv-world meetkai-functionary-medium-v3.2 microsoft-Phi-3.5-mini-instruct muse-glimmer
"""
# Refuse two calls in a turn.
LONE = """
meta-llama-Llama-3.1-8B-Instruct meta-llama-Llama-3.2-3B-Instruct meta-llama-Llama-3.3-70B-Instruct
"""
EXPECTED = {"template": set(DERIVED.split()), "generic": set(GENERIC.split())}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    """The demo's, with a first token, which some templates cannot do without."""
    made = Tokenizer(DEMO)
    made.special_tokens = {"bos_token": "<s>", **made.special_tokens}
    return made


def test_how_many_templates_show_calls_that_are_read(tokenizer: Tokenizer) -> None:
    names: dict[str, set[str]] = {}
    lone = set()
    for path in sorted(Path(str(FOLDER)).glob("*.jinja")):
        source = path.read_text(encoding="utf-8")
        seen = rendered(source, tokenizer)
        found = format_of(replace(INFO, chat_template=source), "auto", seen)
        kind = found.name if found.name in EXPECTED else "family"
        names.setdefault(kind, set()).add(path.stem)
        lone |= {path.stem} if found.lone else set()
        if kind != "generic" and found.name not in NO_PROOF:
            assert is_proved(found, seen), path.stem
    assert len(names.pop("family")) == 32
    assert names == EXPECTED
    assert lone == set(LONE.split())


def test_most_families_could_be_read_from_their_templates_too(tokenizer: Tokenizer) -> None:
    """What is derived holds against what was written by hand: only these three have to be."""
    for path in sorted(Path(str(FOLDER)).glob("*.jinja")):
        source = path.read_text(encoding="utf-8")
        seen = rendered(source, tokenizer)
        found = format_of(replace(INFO, chat_template=source), "auto", seen)
        if found.name not in (*EXPECTED, *BY_HAND):
            assert derived(seen, (), ()), path.stem


def test_no_template_writes_a_word_for_no_content_or_refuses_what_replies_hold(tokenizer: Tokenizer) -> None:
    """Turns with calls as the server tells them: content null, thoughts, a preamble."""
    for path in sorted(Path(str(FOLDER)).glob("*.jinja")):
        template = ChatTemplate({"default": path.read_text(encoding="utf-8")}, tokenizer, path.stem)

        def written(turn: dict[str, object], template: ChatTemplate = template) -> str | None:
            try:
                return template.render(Chat([ASKED, turn, RESULT], {"tools": TOOLS}))
            except InvalidRequest:
                return None

        of_null, of_empty, of_all = (
            written(one) for one in (called(None), called(""), called("I look.", reasoning_content="hm"))
        )
        words = [len(re.findall("None|null", one or "")) for one in (of_null, of_empty)]
        assert (of_null is None, of_all is None) == (of_empty is None, of_empty is None), path.stem
        assert words[0] <= words[1], path.stem
