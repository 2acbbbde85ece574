"""The table of drafters, one row each: the only place that names them; the rest of the server reads it here.

Which names there are, what `auto` loads, which settings belong to a drafter, which folder holds a network for it and
how both are made: everything follows from `DRAFTERS`. A new drafter is a file and a row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch

from slipstream.engine.cache.cache import Cache
from slipstream.engine.checkpoint.weights import tensor_names
from slipstream.engine.errors import UnsupportedModel
from slipstream.engine.models.heads.assistant import is_assistant, load_assistant
from slipstream.engine.models.heads.dflash import is_dflash, load_dflash
from slipstream.engine.models.heads.dspark import is_dspark, load_dspark
from slipstream.engine.models.heads.eagle3 import is_eagle3, load_eagle3
from slipstream.engine.models.heads.head_choices import HeadChoices
from slipstream.engine.models.heads.mtp import is_whole_model, load_mtp, mtp_tensors
from slipstream.engine.models.network import Network
from slipstream.engine.models.reading.documents import has_config, read_documents
from slipstream.engine.models.reading.fields import Fields
from slipstream.engine.settings import Settings
from slipstream.engine.speculate.bench.garbage import Garbage
from slipstream.engine.speculate.bench.synthetic import Synthetic
from slipstream.engine.speculate.drafter import Drafter
from slipstream.engine.speculate.network.draft_assistant import DraftAssistant
from slipstream.engine.speculate.network.draft_block import DraftBlock
from slipstream.engine.speculate.network.draft_hidden import DraftHidden
from slipstream.engine.speculate.network.draft_model import STORE, DraftModel
from slipstream.engine.speculate.ngram.ngram_cache import NgramCache
from slipstream.engine.speculate.ngram.ngram_device import NgramDevice
from slipstream.engine.speculate.ngram.ngram_map import NgramMapK, NgramMapK4V
from slipstream.engine.speculate.ngram.ngram_mod import NgramMod
from slipstream.engine.speculate.ngram.ngram_simple import NgramSimple
from slipstream.engine.speculate.text.forced import Forced
from slipstream.engine.speculate.text.prediction import Prediction
from slipstream.engine.speculate.text.shared_history import SharedHistory
from slipstream.engine.speculate.text.suffix import Suffix

TensorNames = frozenset[str]


@dataclass(frozen=True, slots=True)
class Parts:
    """What drafters are built from."""

    settings: Settings
    networks: Mapping[str, Any]  # by store: the target, a draft model, or a head by its drafter's name
    cache: Cache
    batch_size: int  # rows of a pass
    vocab_size: int
    eos_ids: frozenset[int]
    n_ctx: int  # most tokens of a sequence
    device: torch.device  # the target's

    @property
    def n_context(self) -> int:
        """Tokens before a guess that a network is fed at least."""
        return min(self.settings.draft_context or self.n_ctx, self.n_ctx)

    @property
    def n_slots(self) -> int:
        return self.settings.parallel

    def given(self, prefix: str) -> dict[str, Any]:
        """The settings whose names begin so, by the rest of their names."""
        return {name.removeprefix(prefix): getattr(self.settings, name) for name in setting_names(prefix)}


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkKind:
    """A kind of draft network: which folders hold it, and how it is loaded."""

    fits: Callable[[TensorNames], bool]  # whether a folder with these tensors holds such a network
    # (folder, target, most tokens of a sequence, what the user says of it) -> head; None: a model of its own, loaded as
    # the target is.
    load: Callable[[Path, Network, int, HeadChoices], Any] | None = None
    exported_as: str | None = None  # what files of the `speculators` library call it
    # (tensors of a target's folder, its layers) -> those of a head that came with it; None: never there.
    within: Callable[[TensorNames, int], TensorNames] | None = None
    reads_cache: bool = False  # the target's own keys and values


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A drafter's entry in the table."""

    name: str
    build: Callable[[Parts], Drafter]
    # Compiles what `build` would compile else, before there are parts; at the first start that takes seconds.
    compile: Callable[[], object] = lambda: None
    aliases: tuple[str, ...] = ()
    # Settings, or what their names begin with, that have no use without this drafter or another that lists them too.
    settings: tuple[str, ...] = ()
    needs_one_of: tuple[str, ...] = ()  # settings of which at least one must be set
    network: NetworkKind | None = None  # what it runs; None: it only reads text
    # Whether `auto` loads it; the second argument: whether passes are launched behind unread passes. Drafters with a
    # network are loaded where their network is.
    is_auto: Callable[[Settings, bool], bool] = lambda settings, overlaps: False
    # What of a request it drafts from: "prediction", "grammar". It is asked for requests that bring one and for no
    # others, whatever types they name; every server that drafts loads it, as it costs nothing until then.
    brought_by: str | None = None
    is_sized: bool = False  # whether requests may set its n-gram sizes
    is_offered: bool = True  # to users; False: for tests and benchmarks


def _suffix(parts: Parts) -> Drafter:
    mode, size = parts.settings.spec_shared_history, parts.settings.spec_shared_history_size
    return Suffix(parts.n_slots, None if mode == "off" else SharedHistory(size, mode))


def _head(make: Callable[..., Drafter], name: str) -> Callable[[Parts], Drafter]:
    return lambda parts: make(name, parts.networks[name], parts.cache, parts.n_context)


# In the order in which `--spec-order fixed` asks them, and in which a folder is tried for the kind of its network: an
# assistant's layers have a model's names, a DSpark folder has all that a DFlash folder has, and a whole model may bring
# an MTP head.
DRAFTERS = (
    Row(name="forced", build=lambda parts: Forced(), brought_by="grammar"),
    Row(
        name="prediction",
        build=lambda parts: Prediction(parts.n_slots),
        compile=lambda: Prediction(1),
        brought_by="prediction",
    ),
    Row(
        name="ngram-simple",
        build=lambda parts: NgramSimple(n_slots=parts.n_slots, **parts.given("spec_ngram_simple_")),
        settings=("spec_ngram_simple_",),
        is_sized=True,
    ),
    Row(
        name="ngram-map-k",
        build=lambda parts: NgramMapK(n_slots=parts.n_slots, **parts.given("spec_ngram_map_k_")),
        settings=("spec_ngram_map_k_",),
        is_sized=True,
    ),
    Row(
        name="ngram-map-k4v",
        build=lambda parts: NgramMapK4V(n_slots=parts.n_slots, **parts.given("spec_ngram_map_k4v_")),
        settings=("spec_ngram_map_k4v_",),
        is_sized=True,
    ),
    Row(
        name="ngram-mod",
        build=lambda parts: NgramMod(n_slots=parts.n_slots, **parts.given("spec_ngram_mod_")),
        settings=("spec_ngram_mod_",),
    ),
    Row(
        name="ngram-cache",
        build=lambda parts: NgramCache(
            n_slots=parts.n_slots, vocab_size=parts.vocab_size, **parts.given("lookup_cache_")
        ),
        settings=("lookup_cache_",),
        is_auto=lambda settings, overlaps: bool(
            settings.lookup_cache_static or settings.lookup_cache_dynamic
        ),
    ),
    # The only drafter that `auto` always loads: it finds what the others that read text find.
    Row(
        name="suffix",
        build=_suffix,
        compile=lambda: Suffix(1),
        settings=("spec_shared_history",),
        is_auto=lambda settings, overlaps: True,
    ),
    Row(
        name="draft-assistant",
        build=lambda parts: DraftAssistant(parts.networks["draft-assistant"], parts.cache),
        network=NetworkKind(fits=is_assistant, load=load_assistant, reads_cache=True),
        settings=("draft_p_min", "draft_taps", "draft_position"),
    ),
    Row(
        name="draft-model",
        aliases=("draft-simple",),
        build=lambda parts: DraftModel(parts.networks[STORE], parts.cache, parts.batch_size, parts.n_context),
        network=NetworkKind(fits=is_whole_model),
        settings=("draft_p_min", "draft_context", "device_draft"),
    ),
    Row(
        name="draft-eagle3",
        build=_head(DraftHidden, "draft-eagle3"),
        network=NetworkKind(fits=is_eagle3, load=load_eagle3, exported_as="eagle3"),
        settings=("draft_p_min", "draft_context", "draft_taps"),
    ),
    Row(
        name="draft-mtp",
        build=_head(DraftHidden, "draft-mtp"),
        network=NetworkKind(
            fits=lambda names: bool(mtp_tensors(names, 0)),
            load=load_mtp,
            within=mtp_tensors,
        ),
        settings=("draft_p_min", "draft_context", "draft_taps", "draft_recycled"),
    ),
    Row(
        name="draft-dspark",
        build=_head(DraftBlock, "draft-dspark"),
        network=NetworkKind(fits=is_dspark, load=load_dspark, exported_as="dspark"),
        settings=("draft_p_min", "draft_context", "draft_taps"),
    ),
    Row(
        name="draft-dflash",
        build=_head(DraftBlock, "draft-dflash"),
        network=NetworkKind(fits=is_dflash, load=load_dflash, exported_as="dflash"),
        settings=("draft_p_min", "draft_context", "draft_taps"),
    ),
    Row(
        name="ngram-device",
        aliases=("ngram-gpu",),
        build=lambda parts: NgramDevice(parts.n_slots, parts.n_ctx, parts.device),
        is_auto=lambda settings, overlaps: overlaps,
    ),
    Row(name="garbage", build=lambda parts: Garbage(parts.vocab_size), is_offered=False),
    Row(
        name="synthetic",
        build=lambda parts: Synthetic(parts.vocab_size, parts.eos_ids),
        needs_one_of=("spec_synth_len", "spec_synth_rates"),
        is_offered=False,
    ),
)
BY_NAME = {row.name: row for row in DRAFTERS} | {alias: row for row in DRAFTERS for alias in row.aliases}
NETWORKS = {row.name: row.network for row in DRAFTERS if row.network is not None}


def setting_names(*prefixes: str) -> list[str]:
    """The settings whose names begin with any of these."""
    return [field.name for field in fields(Settings) if field.name.startswith(prefixes)]


def kind_of(path: Path | str) -> str:
    """The drafter whose network a folder holds, by what its config and its tensors say.

    A whole model is a draft model even if it brings an MTP head of its own. Raises `LoadError` if the folder
    cannot be read and `UnsupportedModel` if it holds none of these.
    """
    folder = Path(path)
    names = tensor_names(folder)
    said = read_documents(folder)[0] if has_config(folder) else Fields({}, str(folder))
    if said.has("speculators_model_type"):
        exported = {kind.exported_as: name for name, kind in NETWORKS.items() if kind.exported_as is not None}
        if (found := exported.get(said.text("speculators_model_type"))) is None:
            raise said.refuse("speculators_model_type", f"must be one of {', '.join(sorted(exported))}")
        return found
    for name, kind in NETWORKS.items():
        if kind.fits(names):
            return name
    raise UnsupportedModel(f"{folder}: neither a model nor a draft head of a kind that is known here")
