"""ngram-simple: the last n tokens looked up in the slot's own text; what followed them is the draft.

Source: prompt lookup decoding (Saxena 2023) as llama.cpp's `ngram-simple` has it: the latest earlier occurrence wins.
"""

from __future__ import annotations

from slipstream.engine.speculate.ngram.copying import Copying


class NgramSimple(Copying):
    """Copies what followed the newest earlier occurrence, as far as the sizes say."""

    name = "ngram-simple"
