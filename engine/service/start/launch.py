"""Settings -> a warm engine: checkpoints, cache, drafters, start-up measurements.

What is worked out here (context, pages, batch size) is not a setting; it is logged once and shown in `/props`.
"""

from __future__ import annotations

import hashlib
import logging
import os
import sys
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from slipstream.engine.api import ModelInfo
from slipstream.engine.batch import numbered, use_device
from slipstream.engine.cache.cache import Cache
from slipstream.engine.core import forward
from slipstream.engine.core.engine import Engine
from slipstream.engine.core.plan import Capacity
from slipstream.engine.core.queue import Waiting
from slipstream.engine.errors import DraftMismatch, SettingError
from slipstream.engine.images import OpenVision
from slipstream.engine.models.network import Network
from slipstream.engine.models.reading.documents import checkpoint_files, text_source
from slipstream.engine.models.registry import load_network, read_model
from slipstream.engine.models.translated import TranslatedNetwork, shared_tokens, translate
from slipstream.engine.naming import NO_DRAFTER, as_text
from slipstream.engine.ranges import SAMPLING_RANGES
from slipstream.engine.ranks import ALONE, Ranks
from slipstream.engine.service.run.preparing import Text
from slipstream.engine.service.run.rank_processes import RankProcesses
from slipstream.engine.service.run.showing import Sight
from slipstream.engine.service.run.slot_files import SlotFiles, state_fingerprint
from slipstream.engine.service.run.thread import ThreadEngine
from slipstream.engine.service.start import divided
from slipstream.engine.service.start.capture import capture_passes
from slipstream.engine.service.start.checkpoint_path import local_checkpoint, model_name, run_dtype
from slipstream.engine.service.start.draft_network import (
    DraftSource,
    draft_source,
    head_token_bytes,
    load_head,
)
from slipstream.engine.service.start.drafters import compiling, drafter_types
from slipstream.engine.service.start.given_template import with_given_template
from slipstream.engine.service.start.operators import select_operators
from slipstream.engine.service.start.sizes import (
    PAGE_SIZE,
    Checkpoint,
    Memory,
    batch_size,
    context,
    make_cache,
    shared_size,
    why_shorter,
)
from slipstream.engine.settings import Settings
from slipstream.engine.settings_check import check
from slipstream.engine.speculate.acceptance import SyntheticAcceptance, coupled, synthetic_rates
from slipstream.engine.speculate.chain import Chain
from slipstream.engine.speculate.decide.value import Lengths
from slipstream.engine.speculate.drafter import DeviceDrafter, Drafter
from slipstream.engine.speculate.network import draft_model
from slipstream.engine.speculate.registry import BY_NAME, Parts
from slipstream.engine.text.chat import load_chat_template
from slipstream.engine.text.grammar.grammars import Grammars
from slipstream.engine.text.tokenizer import Tokenizer, by_id, same_vocabulary
from slipstream.kernels.team import end_team

log = logging.getLogger(__name__)

_LEAST_SHARED = 0.5  # of the target's tokens that a draft model must have


def launch(settings: Settings, open_vision: OpenVision | None = None) -> ThreadEngine:
    """Load everything and start the engine's thread. Raises `LoadError`. Blocks until warm.

    open_vision: how the part of a checkpoint that sees images is opened; None: the engine sees none.
    """
    check(settings)
    slot_folder = _slot_folder(settings)
    _set_threads(settings.threads)
    target_from = _target_checkpoint(settings)
    use_device(target_from.device)
    draft_path = None if settings.model_draft is None else local_checkpoint(settings.model_draft)
    source = draft_source(draft_path, target_from)
    # What a pass reads on the device alone, other ranks do not have.
    overlaps = settings.async_scheduling and target_from.device.type == "cuda" and target_from.n_ranks == 1
    types = drafter_types(settings, None if source is None else source.name, overlaps=overlaps)
    rates = synthetic_rates(settings, types)  # refused, if it must be, before anything is loaded
    text_from = text_source(target_from.path)
    tokenizer = Tokenizer(text_from)
    template = load_chat_template(with_given_template(text_from, settings), tokenizer)
    used = source if source and source.name in types else None
    divided.check(settings, target_from, used)
    sight = _sight(settings, open_vision, target_from, used)  # first, so that its memory counts as taken
    with compiling(types), _phase("weights loaded"):
        loaded = _networks(settings, target_from, tokenizer, used)
    n_ctx, networks, processes = loaded.n_ctx, loaded.networks, loaded.processes
    target = networks[forward.STORE]
    capacity = Capacity(
        n_slots=settings.parallel,
        n_ctx=n_ctx,
        batch_size=batch_size(settings, target.device),
        eos_ids=tokenizer.eos_ids,
        shared_size=shared_size(settings, target.device),
        overlaps=overlaps,
    )
    cache = make_cache(settings, networks, n_ctx, None if processes is None else processes.others)
    sizes = capacity.batch_size, target.vocab_size, tokenizer.eos_ids, n_ctx, target.device
    parts = Parts(settings, networks, cache, *sizes)
    drafters = [BY_NAME[name].build(parts) for name in types]
    if rates is not None:
        settings = _always_in_full(settings, drafters)
        rates = synthetic_rates(settings, types)
    lengths, by_value = Lengths(adaptive=settings.spec_adaptive), settings.spec_order == "value"
    chain = Chain(drafters, lengths, by_value=by_value, now=time.perf_counter)
    acceptance = coupled if rates is None else SyntheticAcceptance(rates, tokenizer.eos_ids)
    waiting = Waiting(settings.max_queue_wait, settings.request_timeout)
    engine = Engine(target, cache, chain, capacity, acceptance, waiting)
    if settings.capture_passes:
        capture_passes(engine, settings, settings.draft_max if types else 0, processes)
    with _phase("warm"):
        engine.warm_up(settings.draft_max)
    suppressed = tuple(one for one in target_from.config.suppressed if one < target.vocab_size)
    text = Text(tokenizer, template, Grammars(tokenizer, target.vocab_size), sight, suppressed)
    info = _info(settings, target_from, text, engine, types, loaded)
    made_by = [one.path for one in (target_from, used) if one]
    slot_files = None if slot_folder is None else _slot_files(slot_folder, made_by, cache, settings)
    _log_ready(info)
    end_team()  # passes run on the engine's own thread
    return ThreadEngine(engine, text, info, settings, slot_files, processes)


def _set_threads(n: int | None) -> None:
    if n is None:
        return
    torch.set_num_threads(n)
    n_cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or n
    if n > n_cores:
        # A pass has hundreds of operations, and each waits for all of its threads.
        log.warning(
            "--threads %d is more than the cores here, %d: passes may be many times slower", n, n_cores
        )


def _target_checkpoint(settings: Settings) -> Checkpoint:
    if not settings.model:
        raise SettingError("model", "''", "a model folder or hub name is needed")
    found = _checkpoint(settings.model, settings.device, settings.dtype)
    if found.device.type == "cpu" and found.dtype is torch.float16:
        log.warning("--dtype float16 on a CPU: text may depend on drafts and load; auto is exact")
    return replace(found, n_ranks=settings.tensor_parallel_size)


def _sight(
    settings: Settings, open_vision: OpenVision | None, source: Checkpoint, draft: DraftSource | None
) -> Sight:
    """What sees images: of the model, and of a draft model."""
    if open_vision is None:
        return Sight()
    target = open_vision(source.path, source.dtype, source.device, settings)
    if target is None or draft is None or draft.kind.load is not None:
        return Sight(target)
    own = _draft_checkpoint(draft, source, settings)
    return Sight(target, open_vision(own.path, own.dtype, own.device, settings))


def _always_in_full(settings: Settings, drafters: Sequence[Drafter]) -> Settings:
    """The settings with drafts of one length, which all networks can make."""
    longest = [one.longest for one in drafters if isinstance(one, DeviceDrafter)]
    return replace(settings, spec_adaptive=False, draft_max=min([settings.draft_max, *longest]))


def _slot_folder(settings: Settings) -> Path | None:
    """Where slots are saved, if they can be."""
    name = settings.slot_save_path
    if name is not None and (not name or not os.access(name, os.W_OK) or not Path(name).is_dir()):
        raise SettingError("slot_save_path", name or "''", "must be a folder that can be written to")
    return None if name is None else Path(name)


def _slot_files(folder: Path, made_by: Sequence[Path], cache: Cache, settings: Settings) -> SlotFiles:
    made = state_fingerprint(made_by, cache, rounds=settings.round_activations)
    return SlotFiles(folder, made, PAGE_SIZE)


@dataclass(frozen=True, slots=True)
class _Loaded:
    n_ctx: int
    networks: dict[str, Any]  # by the name of their store: the target, then a draft model or a head
    replaced: tuple[str, ...]  # operators
    inexact_sums: str | None  # over ranks: what is wrong with them
    processes: RankProcesses | None  # that have the other parts of the target


def _networks(
    settings: Settings, target_from: Checkpoint, tokenizer: Tokenizer, source: DraftSource | None
) -> _Loaded:
    draft_from, head_bytes = None, 0
    if source is not None and source.kind.load is None:
        draft_from = _draft_checkpoint(source, target_from, settings)
    elif source is not None:
        head_bytes = head_token_bytes(source, target_from, settings)
    sources = [one for one in (target_from, draft_from) if one is not None]
    n_ctx = _context(settings, sources, head_bytes)
    selection, processes, inexact = select_operators(sources, settings), None, None
    if target_from.n_ranks > 1:
        processes = divided.start(settings, target_from, n_ctx, tokenizer.vocab_size, selection)
        inexact = divided.prove_sums(settings, target_from, processes)
    target = _load(target_from, tokenizer, n_ctx, ALONE if processes is None else processes.ranks)
    if processes is not None:
        processes.await_all()
    networks: dict[str, Any] = {forward.STORE: target}
    if draft_from is not None:
        networks[draft_model.STORE] = _load_draft(draft_from, tokenizer, n_ctx)
    elif source is not None:
        networks[source.name] = load_head(source, target, n_ctx, settings)
    return _Loaded(n_ctx, networks, selection.replaced, inexact, processes)


def _context(settings: Settings, sources: Sequence[Checkpoint], head_bytes: int) -> int:
    """Most tokens of one sequence: as many as fit on the device of each network. A head is where the target is."""
    on_device: dict[torch.device, list[Checkpoint]] = {}
    for one in sources:
        on_device.setdefault(one.device, []).append(one)
    positions = [one.config.n_ctx_train for one in sources]
    least = []
    for device, own in on_device.items():
        memory = Memory.of(device, own[0].n_ranks)
        n_ctx = context(settings, own, memory, head_bytes if own[0] is sources[0] else 0)
        least.append((n_ctx, why_shorter(settings, n_ctx, positions, memory.free)))
    n_ctx, reason = min(least, key=lambda one: one[0])
    if reason is not None:
        log.warning("context n_ctx=%d of the model's %d: %s", n_ctx, positions[0], reason)
    return n_ctx


@contextmanager
def _phase(name: str) -> Generator[None, None, None]:
    """Log a part of the start when it is over, with its time."""
    started = time.perf_counter()
    yield
    log.info("%s seconds=%.1f", name, time.perf_counter() - started)


def _log_ready(info: ModelInfo) -> None:
    told = {
        "model": info.name,
        "n_params": info.n_params,
        "dtype": info.dtype,
        "device": info.device,
        "n_ctx": info.n_ctx,
        "n_slots": info.n_slots,
        "n_pages": info.n_pages,
        "page_size": info.page_size,
        "drafters": ",".join(info.drafters) or NO_DRAFTER,
    }
    log.info("loaded %s", " ".join(f"{name}={value}" for name, value in told.items()))


def _checkpoint(name: str, device: str, dtype: str, setting: str = "device") -> Checkpoint:
    path = local_checkpoint(name)
    config = read_model(path)
    where = _device(device, setting)
    return Checkpoint(path, config, where, run_dtype(config, dtype, where))


def _draft_checkpoint(source: DraftSource, target: Checkpoint, settings: Settings) -> Checkpoint:
    """A draft model's. Raises `SettingError` for a GPU that is not the target's: launches go to one."""
    name = settings.device_draft
    if name is None:
        return _checkpoint(str(source.path), str(target.device), settings.dtype)
    draft = _checkpoint(str(source.path), name, settings.dtype, "device_draft")
    if draft.device.type == target.device.type == "cuda" and draft.device != target.device:
        raise SettingError(
            "device_draft", name, f"another GPU than the target's ({target.device}); leave it out"
        )
    return draft


def _device(name: str, setting: str) -> torch.device:
    if name == "auto":
        return numbered(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    try:
        device = torch.device(name)
    except RuntimeError:
        raise SettingError(setting, name, "is not cpu, cuda or cuda:N") from None
    if device.type not in ("cpu", "cuda"):
        raise SettingError(setting, name, "is not cpu, cuda or cuda:N")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise SettingError(setting, name, f"this machine has {torch.cuda.device_count()} CUDA devices")
    return numbered(device)


def _load(source: Checkpoint, tokenizer: Tokenizer, n_ctx: int, ranks: Ranks = ALONE) -> Network:
    return load_network(source.path, source.dtype, source.device, n_ctx, tokenizer.vocab_size, ranks)


def _load_draft(source: Checkpoint, tokenizer: Tokenizer, n_ctx: int) -> Network | TranslatedNetwork:
    """The draft model, in the target's token ids. Raises `DraftMismatch` if they have too few tokens in common."""
    own = Tokenizer(text_source(source.path))
    if same_vocabulary(tokenizer, own) and source.config.vocab_rows >= tokenizer.vocab_size:
        return _load(source, tokenizer, n_ctx)
    ours, theirs = by_id(tokenizer), by_id(own)
    share = len(shared_tokens(ours, theirs)) / max(1, len(ours))
    if share < _LEAST_SHARED:
        raise DraftMismatch(
            f"{source.path}: has {share:.0%} of the target's {len(ours)} tokens,"
            f" at least {_LEAST_SHARED:.0%} are needed"
        )
    log.info("vocabulary shared=%.1f%%: ids are translated between draft and target", 100 * share)
    return translate(_load(source, own, n_ctx), ours, theirs, tokenizer.vocab_size)


def _info(
    settings: Settings, source: Checkpoint, text: Text, engine: Engine, types: Sequence[str], loaded: _Loaded
) -> ModelInfo:
    target, tokenizer, stats = engine.target.network, text.tokenizer, engine.stats()
    defaults = dict(source.config.sampling)
    for name in SAMPLING_RANGES:
        value = getattr(settings, name, None)  # `logit_bias` has no setting
        if value is not None:
            defaults[name] = value
    return ModelInfo(
        name=(settings.names or (model_name(source.path, settings.model),))[0],
        path=as_text(source.path),
        architecture=source.config.architecture,
        n_params=target.n_params,
        weight_bytes=target.weight_bytes,
        vocab_size=target.vocab_size,
        n_ctx=engine.capacity.n_ctx,
        n_ctx_train=source.config.n_ctx_train,
        n_slots=engine.capacity.n_slots,
        batch_size=engine.capacity.batch_size,
        n_pages=stats.n_pages_free + stats.n_pages_cached + stats.n_pages_held,
        page_size=PAGE_SIZE,
        device=str(target.device),
        dtype=str(target.dtype).removeprefix("torch."),
        drafters=tuple(types),
        chat_template=text.template.source if text.template is not None else None,
        bos_token=tokenizer.token(tokenizer.bos_id) if tokenizer.bos_id is not None else None,
        eos_tokens=tuple(tokenizer.token(one) or str(one) for one in sorted(tokenizer.eos_ids)),
        fingerprint=_fingerprint(source.path, settings, types),
        created=int(time.time()),
        sampling_defaults=defaults,
        added_tokens=tokenizer.added_tokens,
        tool_template=text.template.tool_source if text.template is not None else None,
        n_embd=source.config.d_model,
        replaced_operators=loaded.replaced,
        inexact_sums=loaded.inexact_sums,
        modalities=("text",) if text.sight.target is None else ("text", "image"),
    )


def _fingerprint(path: Path, settings: Settings, types: Sequence[str]) -> str:
    """Changes with config, weights (header and size of each file), dtypes, rounding and drafters."""
    arithmetic = settings.dtype, settings.kv_cache_dtype, settings.round_activations
    digest = hashlib.sha256(repr((arithmetic, settings.device, settings.model_draft, types)).encode())
    config, weights = checkpoint_files(path)
    digest.update(b"".join(file.read_bytes() for file in config))
    for file in weights:
        with file.open("rb") as stream:
            digest.update(stream.read(1 << 16))
        digest.update(str(file.stat().st_size).encode())
    return f"slipstream-{digest.hexdigest()[:12]}"
