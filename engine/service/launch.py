"""Settings -> a warm engine: checkpoints, cache, drafters, start-up measurements.

What is worked out here (context, pages, batch size) is not a setting; it is logged once and shown in `/props`.
"""

from __future__ import annotations

import hashlib
import logging
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from engine.api import ModelInfo
from engine.cache.cache import Cache
from engine.cache.kv import KVStore
from engine.core import forward
from engine.core.engine import Capacity, Engine
from engine.errors import DraftMismatch, LoadError, SettingError
from engine.models.config import DTYPES, ModelConfig, read_config
from engine.models.network import Network
from engine.models.registry import load_network
from engine.service.drafters import build, drafter_types
from engine.service.thread import Text, ThreadEngine
from engine.settings import Settings, check
from engine.speculate import draft_model
from engine.speculate.chain import Chain
from engine.speculate.length import Lengths
from engine.speculate.resolve import NO_DRAFTER
from engine.text.chat import load_chat_template
from engine.text.tokenizer import Tokenizer, same_vocabulary
from kernels import select

log = logging.getLogger(__name__)

PAGE_SIZE = 64
_CPU_SHARE = 0.25  # of free host memory for the cache
_CUDA_SHARE = 0.9  # of device memory left after the weights


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint folder and how it will run."""

    path: Path
    config: ModelConfig
    device: torch.device
    dtype: torch.dtype


def launch(settings: Settings) -> ThreadEngine:
    """Load everything and start the engine's thread. Raises `LoadError`. Blocks until warm."""
    check(settings)
    started = time.perf_counter()
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    if not settings.model:
        raise SettingError("model", "''", "a model folder or hub name is needed")
    types = drafter_types(settings)
    target_from = _checkpoint(settings.model, settings.device, settings.dtype)
    draft_from = None
    if settings.model_draft is not None:
        draft_from = _checkpoint(
            settings.model_draft, settings.device_draft or settings.device, settings.dtype
        )
    tokenizer = Tokenizer(target_from.path)
    n_ctx = _context(settings, target_from, draft_from)
    _select_ops([one for one in (target_from, draft_from) if one is not None])
    target = _load(target_from, tokenizer, n_ctx)
    networks = {forward.STORE: target}
    if draft_from is not None:
        _check_vocabulary(tokenizer, draft_from)
        networks[draft_model.STORE] = _load(draft_from, tokenizer, n_ctx + settings.draft_max)
    capacity = Capacity(
        n_slots=settings.parallel,
        n_ctx=n_ctx,
        batch_size=_batch_size(settings, target.device),
        eos_ids=tokenizer.eos_ids,
    )
    cache = _cache(settings, networks, capacity)
    lengths = Lengths(adaptive=settings.spec_adaptive)
    drafters = [build(name, settings, networks, cache, capacity) for name in types]
    engine = Engine(target, cache, Chain(drafters, lengths), lengths, capacity)
    engine.warm_up()
    text = Text(tokenizer, load_chat_template(target_from.path, tokenizer))
    info = _info(settings, target_from, text, engine, types)
    log.info(
        "ready model=%s n_params=%d dtype=%s device=%s n_ctx=%d n_slots=%d n_pages=%d page_size=%d"
        " drafters=%s load_s=%.1f",
        info.name,
        info.n_params,
        info.dtype,
        info.device,
        n_ctx,
        info.n_slots,
        info.n_pages,
        PAGE_SIZE,
        ",".join(types) or NO_DRAFTER,
        time.perf_counter() - started,
    )
    return ThreadEngine(engine, text, info, settings)


def _checkpoint(name: str, device: str, dtype: str) -> Checkpoint:
    path = _folder(name)
    config = read_config(path)
    where = _device(device)
    return Checkpoint(path, config, where, config.dtype if dtype == "auto" else DTYPES[dtype])


def _folder(name: str) -> Path:
    """A local folder, or the local copy of a hub repository `org/name`."""
    path = Path(name)
    if path.is_dir():
        return path
    if name.count("/") != 1 or name.startswith((".", "/", "~")):
        raise LoadError(f"{name}: no such folder")
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=["*.json", "*.safetensors", "*.jinja"]))
    except (OSError, ValueError) as error:
        raise LoadError(f"{name}: no such folder, and the hub did not give it: {error}") from error


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise SettingError("device", name, "is not cpu, cuda or cuda:N") from None
    if device.type not in ("cpu", "cuda"):
        raise SettingError("device", name, "is not cpu, cuda or cuda:N")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise SettingError("device", name, f"this machine has {torch.cuda.device_count()} CUDA devices")
    return device


def _load(source: Checkpoint, tokenizer: Tokenizer, n_ctx: int) -> Network:
    return load_network(source.path, source.dtype, source.device, n_ctx, tokenizer.vocab_size)


def _select_ops(sources: Sequence[Checkpoint]) -> None:
    """Fix each op's implementation for every device and dtype in use, and say which."""
    for device, dtype in dict.fromkeys((one.device, one.dtype) for one in sources):
        for line in select(device, dtype):
            log.info("op=%s implementation=%s reason=%s", line.op, line.implementation, line.reason)


def _check_vocabulary(tokenizer: Tokenizer, draft: Checkpoint) -> None:
    """A draft must mean the same tokens as the target, and have an embedding for each of them."""
    shared = same_vocabulary(tokenizer, Tokenizer(draft.path))
    if draft.config.vocab_rows < tokenizer.vocab_size:
        raise DraftMismatch(
            f"{draft.path}: embeds {draft.config.vocab_rows} tokens, the target has"
            f" {tokenizer.vocab_size}; {shared} are shared"
        )


def _context(settings: Settings, target: Checkpoint, draft: Checkpoint | None) -> int:
    most = min(one.config.n_ctx_train for one in (target, draft) if one is not None)
    if settings.ctx_size is None:
        return min(most, 32768)
    if settings.ctx_size > most:
        raise SettingError("ctx_size", settings.ctx_size, f"is more than the {most} positions of the model")
    return settings.ctx_size


def _batch_size(settings: Settings, device: torch.device) -> int:
    size = settings.batch_size or (2048 if device.type == "cuda" else 128)
    if settings.parallel >= size:
        raise SettingError(
            "parallel",
            settings.parallel,
            f"must be less than the {size} rows of a pass (--batch-size), or prompts would never run",
        )
    return size


def _cache(settings: Settings, networks: dict[str, Network], capacity: Capacity) -> Cache:
    """Pages for all slots at full length, or as many as the memory allows; at least one full sequence."""
    page_bytes = PAGE_SIZE * sum(
        layer.token_bytes(network.dtype) for network in networks.values() for layer in network.kv_layers
    )
    pages_each = -(-(capacity.n_ctx + settings.draft_max) // PAGE_SIZE) + 1
    if settings.cache_size is not None:
        n_pages = settings.cache_size * 2**20 // page_bytes
    else:
        free = _free_bytes(networks[forward.STORE].device)
        n_pages = min(2 * pages_each * capacity.n_slots, int(free // page_bytes))
    if n_pages < pages_each:
        raise SettingError(
            "cache_size",
            settings.cache_size or "(free memory)",
            f"gives {n_pages} pages, one sequence of --ctx-size {capacity.n_ctx} needs {pages_each};"
            f" a page has {page_bytes / 2**20:.2f} MiB",
        )
    stores = {
        name: KVStore(network.kv_layers, n_pages, PAGE_SIZE, network.dtype, network.device)
        for name, network in networks.items()
    }
    return Cache(stores, capacity.n_slots, n_pages, PAGE_SIZE)


def _free_bytes(device: torch.device) -> float:
    if device.type == "cuda":
        return _CUDA_SHARE * torch.cuda.mem_get_info(device)[0]
    return _CPU_SHARE * os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _info(
    settings: Settings, source: Checkpoint, text: Text, engine: Engine, types: Sequence[str]
) -> ModelInfo:
    target, tokenizer, stats = engine.target, text.tokenizer, engine.stats()
    defaults = dict(source.config.sampling)
    for name in ("temperature", "top_k", "top_p", "min_p", "seed"):
        value = getattr(settings, name)
        if value is not None:
            defaults[name] = value
    return ModelInfo(
        name=settings.alias or source.path.resolve().name,
        path=str(source.path),
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
    )


def _fingerprint(path: Path, settings: Settings, types: Sequence[str]) -> str:
    """Changes with config, weights (header and size of each file), dtype and drafters."""
    digest = hashlib.sha256(repr((settings.dtype, settings.device, settings.model_draft, types)).encode())
    digest.update((path / "config.json").read_bytes())
    for file in sorted(path.glob("*.safetensors")):
        with file.open("rb") as stream:
            digest.update(stream.read(1 << 16))
        digest.update(str(file.stat().st_size).encode())
    return f"slipstream-{digest.hexdigest()[:12]}"
