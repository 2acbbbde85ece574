"""Mistral 3: the text models of Mistral-Small-3.1 and 3.2, which are Mistral, and of Ministral 3.

Queries of Ministral 3 count more with every 16,384 positions, so that scores stay sharp far behind.
"""

from __future__ import annotations

from slipstream.engine.models.reading.fields import Fields
from slipstream.engine.models.reading.rotation import GROWTH

UNDERSTOOD = ("layer_types", GROWTH)  # keys that other families must refuse
KINDS = ("mistral", "ministral3")  # of text models, of which the second goes on where the first ends


def known_text(fields: Fields) -> Fields:
    """The same, if it is a text model of these. Raises `UnsupportedModel` naming key and value."""
    kind = fields.text("model_type", KINDS[0])
    if kind not in KINDS:
        raise fields.refuse("model_type", f"must be one of {', '.join(KINDS)}")
    if kind == KINDS[1] and not fields.has("rope_parameters"):
        raise fields.refuse("rope_parameters", f"must be given with {KINDS[1]}")
    if kind == KINDS[0] and fields.child("rope_parameters").number(GROWTH, 0.0):
        raise fields.child("rope_parameters").refuse(GROWTH, f"must not be given with {KINDS[0]}")
    return fields.over({"rms_norm_eps": 1e-5}) if kind == KINDS[1] else fields  # as transformers assumes
