"""Ranges of a request's numbers: what the wire takes the engine takes, and what the one refuses the other refuses."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from slipstream.engine.api import Sampling, Speculate
from slipstream.engine.errors import InvalidRequest, LoadError
from slipstream.engine.models.reading.config import SAMPLING_KEYS, read_sampling
from slipstream.engine.models.reading.fields import Fields
from slipstream.engine.sample.params import resolve_sampling
from slipstream.engine.settings import Settings
from slipstream.engine.speculate.resolve import resolve_speculate
from slipstream.server.openai.wire import Generate, Speculative

# Fields that are no number of a fixed range.
OTHERS = {"ignore_eos", "types", "allowed_token_ids", "bad_words"}
SAMPLING = [one.name for one in dataclasses.fields(Sampling) if one.name not in OTHERS]
SPECULATE = [one.name for one in dataclasses.fields(Speculate) if one.name not in OTHERS]
# What the documents say of fields whose readers check the range by themselves.
SAID: dict[str, tuple[float, float]] = {
    "top_k": (0, 2**31 - 1),
    "seed": (0, 2**64 - 1),
    "logit_bias": (-100.0, 100.0),
    "repeat_last_n": (0, 2**31 - 1),
}
NAMES = {"repetition_penalty": "repeat_penalty"}  # other names of a field


def wire_takes(model: type[BaseModel], name: str, value: float) -> bool:
    try:
        model.model_validate({name: {"1": value} if name == "logit_bias" else value})
    except ValidationError:
        return False
    return True


def engine_takes(model: type[BaseModel], name: str, value: float) -> bool:
    name = NAMES.get(name, name)
    try:
        if model is Generate:
            given: Any = [(1, value)] if name == "logit_bias" else value
            resolve_sampling(Sampling(**{name: given}), {}, [], 32)
        else:
            asked = Speculate(**{name: value})
            resolve_speculate(Settings(model="x"), ("ngram-simple",), asked)
    except InvalidRequest:
        return False
    return True


def range_on_the_wire(model: type[BaseModel], name: str) -> tuple[float, float]:
    """The least and the most that a field's schema allows."""
    if name in SAID:
        return SAID[name]
    found = model.model_json_schema()["properties"][name]
    (number,) = [one for one in found.get("anyOf", [found]) if one["type"] in ("number", "integer")]
    assert {"minimum", "maximum"} <= number.keys(), f"{name}: an open end is no range"
    return number["minimum"], number["maximum"]


def step(value: float, up: bool) -> float:
    """The nearest number beyond."""
    if isinstance(value, int):
        return value + 1 if up else value - 1
    return math.nextafter(value, math.inf if up else -math.inf)


@pytest.mark.parametrize(
    ("model", "name"),
    [(Generate, name) for name in (*SAMPLING, *NAMES)] + [(Speculative, name) for name in SPECULATE],
)
def test_wire_and_engine_have_the_same_range(model: type[BaseModel], name: str) -> None:
    least, most = range_on_the_wire(model, name)
    for value in (least, most):
        assert wire_takes(model, name, value), value
        assert engine_takes(model, name, value), value
    for value in (step(least, up=False), step(most, up=True)):
        has_meaning = name in ("top_k", "seed", "repeat_last_n") and value == -1  # in llama-server
        assert wire_takes(model, name, value) == has_meaning, value
        assert not engine_takes(model, name, value), value


@pytest.mark.parametrize("name", [one for one in SAMPLING if hasattr(Settings(model="x"), one)])
def test_flags_have_it_too(name: str) -> None:
    (setting,) = [one for one in dataclasses.fields(Settings) if one.name == name]
    assert (setting.metadata["least"], setting.metadata["most"]) == range_on_the_wire(Generate, name)


def test_checkpoints_have_it_too() -> None:
    """A default that no request could be given would refuse all requests that leave the field out."""
    assert set(SAMPLING_KEYS.values()) <= set(SAMPLING)
    for key, name in SAMPLING_KEYS.items():
        least, most = range_on_the_wire(Generate, name)
        for value in (least, most):
            assert read_sampling(Fields({key: value}, "here")) == {name: value}
        for value in (step(least, up=False), step(most, up=True)):
            with pytest.raises(LoadError, match=key):
                read_sampling(Fields({key: value}, "here"))
