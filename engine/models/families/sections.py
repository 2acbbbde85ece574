"""Which sections of frequencies a family has whose checkpoints need not say it (M-RoPE, arXiv 2409.12191, 2.1)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from slipstream.engine.models.reading.fields import Fields


def sectioned(sections: Sequence[int], *, interleaved: bool) -> Callable[[Fields], Fields]:
    """What writes a family's sections into configs without any, and the order that the family has.

    As transformers does, which goes by the family; a config that says otherwise is refused, as others would obey it.
    """

    def with_sections(fields: Fields) -> Fields:
        key = "rope_parameters" if fields.has("rope_parameters") else "rope_scaling"
        given = fields.child(key).over({"mrope_section": list(sections), "mrope_interleaved": interleaved})
        if given.flag("mrope_interleaved", default=interleaved) != interleaved:
            raise given.refuse("mrope_interleaved", f"must be {str(interleaved).lower()} in this family")
        return Fields({**fields.values, key: given.values}, fields.where)

    return with_sections
