"""Types for the fields of a request that pydantic's own types cannot read, such as a string or a list of strings.

Each type joins the field's type in Python with its reader, a function that validates and converts. The second argument
of `BeforeValidator` is what clients may send, for the OpenAPI document.
"""

from __future__ import annotations

import math
import re
from typing import Annotated, Any, Literal

import orjson
from pydantic import BaseModel, BeforeValidator, Field, ValidationInfo

from slipstream.engine.api import MOST_LOGPROBS
from slipstream.engine.ranges import SAMPLING_RANGES
from slipstream.engine.settings import Settings
from slipstream.server.http.body import shown, wrong
from slipstream.server.images.image_part import ImagePart
from slipstream.server.openai.schema import check_depth
from slipstream.server.openai.sent import ImageUrlPart, TextPart

MAX_STOPS = 32  # OpenAI allows 4; editors send 17 and more
MAX_STOP_LENGTH = 256
MAX_STOP_IDS = 64
MAX_BIASES = 1024
MAX_BAD_WORDS = 128
MAX_ALLOWED_IDS = 65536
MAX_TEMPLATE_KWARGS = 32
MAX_TYPES = 16
# Samplers in the order in which they are applied; then those that do not exist here: fields that would switch them on
# are refused by name, and `infill` only makes editors' completions end sooner.
SAMPLERS = ("penalties", "top_k", "top_p", "min_p", "temperature")
OTHER_SAMPLERS = ("dry", "top_n_sigma", "typ_p", "typical_p", "xtc", "adaptive_p", "infill")
LETTERS = {
    **dict(zip("ekpmt", SAMPLERS, strict=True)),
    **dict(zip("dsyxai", ("dry", "top_n_sigma", "typ_p", "xtc", "adaptive_p", "infill"), strict=True)),
}
TURN_PARTS = ("text", "image_url")
SHOWING = ("user", "tool", "function")  # roles whose turns may have images
DETAILS = ("auto", "low", "high", "original")
TYPE = re.compile(r"(?!(none|auto)$)[a-z0-9-]{1,32}")
INT32 = 2**31 - 1
NO_LIMIT = -1  # as a number of tokens: no limit but the context's end
# Names that the renderer of chat templates uses itself; a request may not redefine them.
TEMPLATE_INTERNALS = frozenset(
    {
        *("messages", "conversation", "tools", "documents", "tokenize", "add_generation_prompt"),
        *("continue_final_message", "chat_template", "template", "bos_token", "eos_token", "pad_token"),
        *("unk_token", "return_tensors", "return_dict", "return_assistant_tokens_mask", "padding"),
        *("truncation", "max_length", "tokenizer", "tokenizer_kwargs", "self", "namespace", "range"),
        *("raise_exception", "strftime_now"),
    }
)


def read_seed(value: Any) -> Any:
    """A seed; None for a random seed, which other servers write as -1."""
    if value is None or (value == -1 and type(value) is int):
        return None
    least, most = SAMPLING_RANGES["seed"]
    if type(value) is not int or not least <= value <= most:
        raise wrong("Input should be an integer from 0 to 2^64 - 1, or -1 for a random seed")
    return value


def read_max_tokens(value: Any) -> Any:
    """A number of tokens, or `NO_LIMIT`, which the server's own limit yields to."""
    if value is None:
        return None
    if type(value) is not int or not NO_LIMIT <= value <= INT32:
        raise wrong(f"Input should be an integer from 0 to {INT32}, or -1 for no limit but the context")
    return value


def read_top_k(value: Any) -> Any:
    return 0 if value == -1 and type(value) is int else value


def read_stop(value: Any) -> Any:
    stops = [value] if isinstance(value, str) else value
    if stops is None:
        return None
    if not isinstance(stops, list) or not all(isinstance(one, str) for one in stops):
        raise wrong("Input should be a string or a list of strings")
    if len(stops) > MAX_STOPS:
        raise wrong(f"Input should have at most {MAX_STOPS} strings")
    if not all(0 < len(one) <= MAX_STOP_LENGTH for one in stops):
        raise wrong(f"Each string should have 1 to {MAX_STOP_LENGTH} characters")
    return stops


def read_stop_ids(value: Any) -> Any:
    if value is None or value == []:
        return None
    if not _are_ids(value) or len(value) > MAX_STOP_IDS:
        raise wrong(f"Input should be a list of at most {MAX_STOP_IDS} token ids")
    return value


def read_allowed_ids(value: Any) -> Any:
    if value is not None and not (_are_ids(value) and len(value) <= MAX_ALLOWED_IDS):
        raise wrong(f"Input should be a list of 1 to {MAX_ALLOWED_IDS} token ids")
    return value


def read_bad_words(value: Any) -> Any:
    if value is not None and (
        not isinstance(value, list)
        or len(value) > MAX_BAD_WORDS
        or not all(isinstance(one, str) and 0 < len(one) <= MAX_STOP_LENGTH for one in value)
    ):
        raise wrong(
            f"Input should be a list of at most {MAX_BAD_WORDS} strings of 1 to {MAX_STOP_LENGTH} characters"
        )
    return value


def read_logit_bias(value: Any) -> Any:
    """`{"token id or text": bias}`, or a list of such pairs, as pairs of a token id or a text and a number."""
    if value is None:
        return None
    pairs = list(value.items()) if isinstance(value, dict) else value
    if not isinstance(pairs, list) or not all(
        isinstance(one, list | tuple) and len(one) == 2 for one in pairs
    ):
        raise wrong("Input should map token ids or texts to numbers, or be a list of such pairs")
    if len(pairs) > MAX_BIASES:
        raise wrong(f"Input should have at most {MAX_BIASES} entries")
    return [(_biased(key), _bias(bias)) for key, bias in pairs]


def _biased(key: Any) -> int | str:
    """A token id, such as 42 or "42", or a text."""
    if isinstance(key, str) and key.isascii() and key.isdecimal() and len(key) <= 10:
        key = int(key)
    if type(key) is int and 0 <= key <= INT32:
        return key
    if not isinstance(key, str) or not 0 < len(key) <= MAX_STOP_LENGTH:
        raise wrong(f"Each key should be a token id, or a text of 1 to {MAX_STOP_LENGTH} characters")
    return key


def _bias(value: Any) -> float:
    least, most = SAMPLING_RANGES["logit_bias"]
    if value is False:
        return -math.inf
    if type(value) not in (int, float) or not least <= value <= most:
        raise wrong(f"Each bias should be a number from {least:g} to {most:g}, or false")
    return float(value)


def read_samplers(value: Any) -> Any:
    """llama-server's `samplers`, a list of names or a text of letters, as the names of those that exist here."""
    if value is None:
        return None
    names = [LETTERS.get(one, one) for one in value] if isinstance(value, str) else value
    if not isinstance(names, list) or not all(isinstance(one, str) for one in names):
        raise wrong("Input should be a list of names of samplers, or a text of their letters")
    if not set(names) <= {*SAMPLERS, *OTHER_SAMPLERS}:
        raise wrong(f"Each name should be one of {', '.join((*SAMPLERS, *OTHER_SAMPLERS))}")
    ours = [one for one in names if one in SAMPLERS]
    if ours != [one for one in SAMPLERS if one in ours]:
        raise wrong(f"only the order {', '.join(SAMPLERS)} is supported", code="unsupported_value")
    return ours


def read_window(value: Any) -> Any:
    return INT32 if value == -1 and type(value) is int else value


def read_content(value: Any) -> Any:
    """A string, or a list of text parts joined by line breaks."""
    return "\n".join(read_texts(value))


def read_turn(value: Any, info: ValidationInfo) -> Any:
    """A message's content, which may be null beside tool calls: one text, or texts and images."""
    if value is None and info.data.get("tool_calls"):
        return None
    if not isinstance(value, list):
        return read_content(value)
    for part in value:
        if not isinstance(part, dict) or not isinstance(part.get("type"), str):
            raise wrong("Each part should be an object with a type")
        if part["type"] not in TURN_PARTS:
            raise wrong("only parts of the types text and image_url are supported", code="unsupported_value")
    if all(part["type"] == "text" for part in value):
        return read_content(value)
    check_shows(info.data.get("role"))
    return [_image(part) if part["type"] == "image_url" else read_content([part]) for part in value]


def check_shows(role: str | None) -> None:
    """Raises an error for a role whose turns cannot have images; None: not a turn, or of no valid role."""
    if role not in (None, *SHOWING):
        raise wrong(
            f"a turn of the {role} cannot show images, only a user's or a tool's", code="unsupported_value"
        )


def _image(part: dict[str, Any]) -> ImagePart:
    """`{"image_url": {"url": …}}`, or `{"image_url": …}`."""
    given = part.get("image_url")
    if isinstance(given, dict):
        detail = given.get("detail")
        if detail is not None and detail not in DETAILS:
            raise wrong(f"'detail' should be one of {', '.join(DETAILS)}")
        given = given.get("url")
    if not isinstance(given, str) or not given:
        raise wrong("Each image_url part should have an address, in 'image_url' or in its 'url'")
    return ImagePart(given)


def read_pieces(value: Any) -> Any:
    """A string, or a list of text parts that are pieces of one text."""
    return "".join(read_texts(value))


def read_texts(value: Any) -> list[str]:
    """The texts of a string or of a list of text parts."""
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list):
        raise wrong("Input should be a string or a list of text parts")
    for part in value:
        if not isinstance(part, dict) or not isinstance(part.get("type"), str):
            raise wrong("Each part should be an object with a type")
        if part["type"] != "text":
            raise wrong("only parts of type 'text' are supported", code="unsupported_value")
        if not isinstance(part.get("text"), str):
            raise wrong("Each text part should have a string in 'text'")
    return [part["text"] for part in value]


def read_prediction_type(value: Any) -> Any:
    """The type of a prediction; OpenAI has only "content" so far."""
    if isinstance(value, str) and value != "content":
        raise wrong("only the type 'content' is supported", code="unsupported_value")
    return value


def read_prompt(value: Any) -> Any:
    """The forms of a prompt as a list of prompts, each a text or a list of token ids and texts.

    A list is a prompt by itself if there is a token id in it, else a list of prompts.
    """
    prompts = value if isinstance(value, list) and not _are_parts(value) else [value]
    prompts = [_text_of(one) for one in prompts]
    if not prompts or not all(isinstance(one, str) or _are_parts(one) for one in prompts):
        raise wrong("Input should be a string, a list of token ids, or a list of those")
    if not all(prompts):
        raise wrong("A prompt should not be empty")
    return prompts


def _are_ids(value: Any) -> bool:
    return (
        isinstance(value, list)
        and bool(value)
        and all(type(one) is int and 0 <= one <= INT32 for one in value)
    )


def _text_of(value: Any) -> Any:
    """The text of llama-server's `{"prompt_string": …}` without media; other values as they are."""
    if isinstance(value, dict) and value.get("multimodal_data") in (None, []):
        return value.get("prompt_string")
    return value


def _are_parts(value: Any) -> bool:
    """Whether it is a list of token ids, or of ids and texts."""
    return (
        isinstance(value, list)
        and any(type(one) is int for one in value)
        and all(isinstance(one, str) or (type(one) is int and 0 <= one <= INT32) for one in value)
    )


def read_logprobs(value: Any) -> Any:
    """A plain completion's `logprobs`; some clients send false for none."""
    return None if value is False else value


def read_types(value: Any) -> Any:
    """Drafter names from a comma-separated string or a list. `none` is the empty list; `auto` is None: the server's."""
    names = value.split(",") if isinstance(value, str) else value
    if names is None:
        return None
    if not isinstance(names, list) or not all(isinstance(one, str) for one in names):
        raise wrong("Input should be a comma list or a list of drafter names")
    names = [one.strip() for one in names]
    if names == ["auto"]:
        return None
    if names == ["none"]:
        return []
    if not 0 < len(names) <= MAX_TYPES or not all(TYPE.fullmatch(one) for one in names):
        raise wrong("Input should be names of loaded drafters, or 'none' or 'auto' alone")
    return names


def read_template_kwargs(value: Any) -> Any:
    if value is None:
        return None
    if not isinstance(value, dict) or len(value) > MAX_TEMPLATE_KWARGS:
        raise wrong(f"Input should be an object of at most {MAX_TEMPLATE_KWARGS} values")
    for name in value:
        if name in TEMPLATE_INTERNALS or name.startswith("_") or not name.isidentifier() or len(name) > 64:
            raise wrong(f"{shown(name)} may not be set by a request")
    check_depth(value)
    return value


def template_defaults(settings: Settings) -> dict[str, Any]:
    """The server's own values for chat templates. Raises ValueError for a `--chat-template-kwargs` that has none."""
    thinking = {} if settings.reasoning == "auto" else {"enable_thinking": settings.reasoning == "on"}
    if not settings.reasoning_budget:
        thinking = {"enable_thinking": False}
    if settings.chat_template_kwargs is None:
        return thinking
    return thinking | (read_template_kwargs(orjson.loads(settings.chat_template_kwargs)) or {})


Texts = str | list[TextPart]
TokenId = Annotated[int, Field(ge=0, le=INT32)]
_Count = Annotated[int, Field(ge=0, le=INT32)] | Literal[-1] | None
_Top = Annotated[int, Field(ge=-1, le=INT32)] | None
_Stop = Annotated[str, Field(min_length=1, max_length=MAX_STOP_LENGTH)]


class PromptObject(BaseModel):
    """llama-server's form of a prompt that could have media; here it has none."""

    prompt_string: str = Field(min_length=1)
    multimodal_data: Annotated[list[Any], Field(max_length=0)] | None = None


_Words = (
    Annotated[str, Field(min_length=1)] | Annotated[list[TokenId | str], Field(min_length=1)] | PromptObject
)
_Name = Annotated[str, Field(pattern="^[a-z0-9-]{1,32}$")]
_Names = Annotated[list[_Name], Field(min_length=1, max_length=MAX_TYPES)]
_Bias = Annotated[float, Field(ge=-100, le=100)] | Literal[False]
_Text = Annotated[str, Field(min_length=1, max_length=MAX_STOP_LENGTH)]
_Biases = (
    Annotated[dict[_Text, _Bias], Field(max_length=MAX_BIASES)]
    | Annotated[list[tuple[TokenId | _Text, _Bias]], Field(max_length=MAX_BIASES)]
)
_Samplers = list[Literal[(*SAMPLERS, *OTHER_SAMPLERS)]]  # type: ignore[valid-type]
_Letters = Annotated[str, Field(pattern=f"^[{''.join(LETTERS)}]*$")]
_Values = Annotated[dict[str, Any], Field(max_length=MAX_TEMPLATE_KWARGS)]
_Logprobs = Annotated[int, Field(ge=0, le=MOST_LOGPROBS)] | Literal[False] | None

MaxTokens = Annotated[int | None, BeforeValidator(read_max_tokens, _Count)]
TopK = Annotated[int | None, BeforeValidator(read_top_k, _Top)]
Seed = Annotated[int | None, BeforeValidator(read_seed, Annotated[int, Field(ge=-1, le=2**64 - 1)] | None)]
Stops = Annotated[
    list[str] | None,
    BeforeValidator(read_stop, _Stop | Annotated[list[_Stop], Field(max_length=MAX_STOPS)] | None),
]
StopIds = Annotated[
    list[int] | None,
    BeforeValidator(read_stop_ids, Annotated[list[TokenId], Field(max_length=MAX_STOP_IDS)] | None),
]
AllowedIds = Annotated[
    list[int] | None,
    BeforeValidator(
        read_allowed_ids, Annotated[list[TokenId], Field(min_length=1, max_length=MAX_ALLOWED_IDS)] | None
    ),
]
BadWords = Annotated[
    list[str] | None,
    BeforeValidator(read_bad_words, Annotated[list[_Stop], Field(max_length=MAX_BAD_WORDS)] | None),
]
LogitBias = Annotated[
    list[tuple[int | str, Annotated[float, Field(allow_inf_nan=True)]]] | None,
    BeforeValidator(read_logit_bias, _Biases | None),
]
Samplers = Annotated[list[str] | None, BeforeValidator(read_samplers, _Samplers | _Letters | None)]
Window = Annotated[int | None, BeforeValidator(read_window, _Top)]
Types = Annotated[list[str] | None, BeforeValidator(read_types, str | _Names | None)]
TemplateKwargs = Annotated[dict[str, Any] | None, BeforeValidator(read_template_kwargs, _Values | None)]
Logprobs = Annotated[int | None, BeforeValidator(read_logprobs, _Logprobs)]
Turn = Annotated[
    str | list[str | ImagePart] | None,
    BeforeValidator(read_turn, str | list[TextPart | ImageUrlPart] | None),
]
Pieces = Annotated[str, BeforeValidator(read_pieces, Texts)]
PredictionType = Annotated[str, BeforeValidator(read_prediction_type, Literal["content"])]
Prompts = Annotated[
    list[str | list[int | str]],
    BeforeValidator(read_prompt, _Words | Annotated[list[_Words], Field(min_length=1)]),
]
