"""The chat templates that `--chat-template` knows by name: turns between two literal texts, without tools or thinking.

The names are llama-server's. They serve checkpoints without a template; a model's own is better where it has one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

_TURNS = """\
{{- bos_token | default('') -}}
{%- set held = namespace(text='') -%}
{%- for message in messages -%}
  {%- set text = message.content | @SHAPE@ -%}
  {%- if message.role in ['system', 'developer'] -%}
    @SYSTEM@
  {%- elif message.role == 'assistant' -%}
    {{- @ASSISTANT@ -}}
  {%- else -%}
    {%- set text = held.text + text -%}
    {%- set held.text = '' -%}
    {{- @USER@ -}}
  {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
  {{- @OPENING@ -}}
{%- endif -%}"""


@dataclass(frozen=True, slots=True)
class Turns:
    """What stands before and behind the text of a turn. `opening`: what makes the model answer."""

    user: tuple[str, str]
    assistant: tuple[str, str]
    opening: str
    system: tuple[str, str] | None = None  # None: before the next user's text, with an empty line between
    is_trimmed: bool = False  # white space around the texts of turns is dropped

    @property
    def source(self) -> str:
        """The Jinja text."""
        before, behind = self.system or ("", "\n\n")
        system = f"{_literal(before)} + text + {_literal(behind)}"
        shown = f"{{{{- {system} -}}}}" if self.system else f"{{%- set held.text = held.text + {system} -%}}"
        return (
            _TURNS.replace("@SYSTEM@", shown)
            .replace("@SHAPE@", "trim" if self.is_trimmed else "string")
            .replace("@ASSISTANT@", f"{_literal(self.assistant[0])} + text + {_literal(self.assistant[1])}")
            .replace("@USER@", f"{_literal(self.user[0])} + text + {_literal(self.user[1])}")
            .replace("@OPENING@", _literal(self.opening))
        )


def _literal(text: str) -> str:
    """A text as a Jinja string."""
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'").replace("\n", "\\n") + "'"


def _headed(
    head: str, behind: str, *, assistant: str = "assistant", system: bool = True, trimmed: bool = False
) -> Turns:
    """Turns that begin alike, with their role in `head`."""

    def of(role: str) -> tuple[str, str]:
        return head.format(role), behind

    own = of("system") if system else None
    return Turns(of("user"), of(assistant), head.format(assistant), own, is_trimmed=trimmed)


NAMED: Mapping[str, Turns] = {
    "chatml": _headed("<|im_start|>{}\n", "<|im_end|>\n"),
    "command-r": Turns(
        ("<|START_OF_TURN_TOKEN|><|USER_TOKEN|>", "<|END_OF_TURN_TOKEN|>"),
        ("<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>", "<|END_OF_TURN_TOKEN|>"),
        "<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>",
        ("<|START_OF_TURN_TOKEN|><|SYSTEM_TOKEN|>", "<|END_OF_TURN_TOKEN|>"),
        is_trimmed=True,
    ),
    "deepseek3": Turns(
        ("<｜User｜>", ""), ("<｜Assistant｜>", "<｜end▁of▁sentence｜>"), "<｜Assistant｜>", ("", "\n\n")
    ),
    "gemma": _headed("<start_of_turn>{}\n", "<end_of_turn>\n", assistant="model", system=False, trimmed=True),
    "granite": _headed("<|start_of_role|>{}<|end_of_role|>", "<|end_of_text|>\n"),
    "llama2": Turns(("[INST] ", " [/INST]"), (" ", " </s>"), "", is_trimmed=True),
    "llama3": _headed("<|start_header_id|>{}<|end_header_id|>\n\n", "<|eot_id|>", trimmed=True),
    "mistral-v7-tekken": Turns(
        ("[INST]", "[/INST]"), ("", "</s>"), "", ("[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]")
    ),
    "phi3": _headed("<|{}|>\n", "<|end|>\n"),
    "phi4": _headed("<|im_start|>{}<|im_sep|>", "<|im_end|>"),
    "vicuna": Turns(("USER: ", "\n"), ("ASSISTANT: ", "</s>\n"), "ASSISTANT:", ("", "\n\n")),
    "zephyr": _headed("<|{}|>\n", "</s>\n"),
}
