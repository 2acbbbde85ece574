"""Where a model's files are: a local folder or GGUF file, or the local copy of a hub repository."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path

import torch

from slipstream.engine.checkpoint.gguf.files import SPLIT, split_files
from slipstream.engine.checkpoint.safetensors_folder import ONLY_SAFETENSORS, PICKLED
from slipstream.engine.errors import LoadError
from slipstream.engine.models.reading.config import DTYPES, ModelConfig
from slipstream.engine.naming import GGUF, as_text, is_gguf, model_path, suggested_beside

log = logging.getLogger(__name__)

CHECKPOINT = ("*.json", "*.safetensors", "*.jinja", "tiktoken.model")
# The hub holds patterns against whole paths, of which `*` is any part. Folders have weights in other forms, for other
# programs; chat templates are all that is read of them.
IN_FOLDERS = ("*/*.json", "*/*.safetensors")
COPIES = "consolidated*.safetensors"  # Mistral's form of weights that lie beside it
CONFIGS = ("config.json", "generation_config.json")
# Of a repository of GGUF files alone the first of these is taken if the name asks for none, as llama.cpp does.
QUANTS = ("Q4_K_M", "Q8_0")
# Names of GGUF files that are no models: encoders of media, statistics for quantising; and of draft heads. A model that
# was quantised by such statistics may have their name within its own.
NO_MODELS = re.compile(r"mmproj|^imatrix|imatrix$", re.IGNORECASE)
HEADS = re.compile("mtp-|eagle3-|dflash-|dspark-", re.IGNORECASE)
_ASK_S = 10.0  # that the hub may take to say which files a repository has


def local_checkpoint(name: str, patterns: Sequence[str] = CHECKPOINT) -> Path:
    """A local folder or GGUF file, or the local copy of what a hub repository has. Raises `LoadError`.

    name: also `org/name`, `org/name:Q4_K_M` for one of the repository's GGUF files, or `org/name/file.gguf`.
    patterns: which of a repository's files are wanted if it has safetensors.
    """
    path = model_path(name)
    if path is not None:
        return path
    repository, wanted = _asked_for(name)
    try:
        return _downloaded(repository, wanted, patterns)
    except _failures() as error:
        reason = f"no such folder or file, and the hub did not give it: {error or type(error).__name__}"
        raise LoadError(f"{name}: {reason}{suggested_beside(Path(name))}") from error


def _failures() -> tuple[type[Exception], ...]:
    """What the hub's library raises. Errors of the network are its client's, which are no `OSError`."""
    from huggingface_hub.errors import HTTPError  # type: ignore[attr-defined]  # of the client that it uses

    return OSError, ValueError, RuntimeError, HTTPError


def _asked_for(name: str) -> tuple[str, str | None]:
    """The repository, and the quantisation or the file that is asked for."""
    if name.count("/") == 2:
        organisation, repository, file = name.split("/")
        return f"{organisation}/{repository}", file
    repository, _, wanted = name.partition(":")
    return repository, wanted or None


def _downloaded(repository: str, wanted: str | None, patterns: Sequence[str]) -> Path:
    """The files that are meant, of the hub, or of the local copy where the hub cannot be asked."""
    from huggingface_hub import HfApi

    try:
        # One request. `list_repo_files` would try again for half a minute where there is no network.
        found = HfApi().model_info(repository, timeout=_ASK_S).siblings or ()
    except _failures() as error:
        listed = _files_here(repository)
        if not listed:
            raise
        return _local_copy(repository, wanted, patterns, listed, str(error) or type(error).__name__)
    return _taken(repository, wanted, patterns, [one.rfilename for one in found])


def _local_copy(
    repository: str, wanted: str | None, patterns: Sequence[str], listed: Sequence[str], why: str
) -> Path:
    """What is meant, of the local copy alone. Raises `LoadError`. why: the hub was not asked."""
    failures: tuple[type[Exception], ...] = (*_failures(), LoadError)
    try:
        path = _taken(repository, wanted, patterns, listed, is_offline=True)
    except failures as error:
        reason = f"the hub cannot be asked ({why}), and the local copy is not enough: {error}"
        raise LoadError(f"{repository}: {reason}") from error
    log.warning("%s: the hub cannot be asked (%s), the local copy is used: %s", repository, why, path)
    return path


def _files_here(repository: str) -> list[str]:
    """The files in the local copy of a repository, which may lack some; none without a copy."""
    from huggingface_hub import snapshot_download

    try:
        folder = Path(snapshot_download(repository, allow_patterns=[], local_files_only=True))
    except FileNotFoundError:
        return []
    return [str(one.relative_to(folder)) for one in sorted(folder.rglob("*")) if one.is_file()]


def _taken(
    repository: str,
    wanted: str | None,
    patterns: Sequence[str],
    listed: Sequence[str],
    *,
    is_offline: bool = False,
) -> Path:
    """Where the files that are meant lie, once they are all here. Raises as the hub's library does, and `LoadError`."""
    from huggingface_hub import hf_hub_download, snapshot_download

    weights = [file for file in listed if "/" not in file and file.endswith(".safetensors")]
    pickled = [file for file in listed if "/" not in file and file.endswith(PICKLED)]
    if wanted is None and (weights or not any(file.lower().endswith(GGUF) for file in listed)):
        if pickled and not weights:
            raise LoadError(f"{repository}: {pickled[0]}: {ONLY_SAFETENSORS}")
        folder = snapshot_download(
            repository,
            allow_patterns=list(patterns),
            ignore_patterns=_not_read(weights),
            local_files_only=is_offline,
        )
        return Path(folder)
    first, *rest = split_files(Path(chosen_file(repository, wanted, listed)))
    path = Path(hf_hub_download(repository, str(first), local_files_only=is_offline))
    for one in rest:
        hf_hub_download(repository, str(one), local_files_only=is_offline)
    return path


def _not_read(weights: Sequence[str]) -> list[str]:
    """Patterns of files that nothing reads, in a repository with these files of weights beside its config."""
    has_others = any(not fnmatchcase(file, COPIES) for file in weights)
    return [*IN_FOLDERS, COPIES] if has_others else [*IN_FOLDERS]


def chosen_file(repository: str, wanted: str | None, listed: Sequence[str]) -> str:
    """The GGUF file of a repository that is meant, the first of a split model. Raises `LoadError` naming what is there.

    wanted: a quantisation, which is part of the file's name, or the file; None: the usual quantisation. Draft heads
    are meant where no model fits.
    """
    models = [
        file
        for file in sorted(listed)
        if file.lower().endswith(GGUF)
        and not NO_MODELS.search(_stem(Path(file)))
        and split_files(Path(file))[0] == Path(file)
    ]
    heads = [file for file in models if HEADS.search(_stem(Path(file)))]
    for some in ([file for file in models if file not in heads], heads):
        for asked in (wanted,) if wanted is not None else QUANTS:
            # No letter before it: F16 is not BF16.
            named = re.compile(rf"(?<![a-z0-9]){re.escape(asked)}", re.IGNORECASE)
            found = [file for file in some if named.search(Path(file).name)]
            # Of Q4_K_M and UD-Q4_K_M the shorter name is the plain one.
            if found:
                return min(found, key=lambda file: (len(_stem(Path(file))), file))
        if wanted is None and some:
            return some[0]
    raise LoadError(
        f"{repository}: has no GGUF file {'' if wanted is None else repr(wanted) + ' '}for a model;"
        f" it has {', '.join(models) or 'none'}"
    )


def _stem(path: Path) -> str:
    """A GGUF file's name without its end, of a split model without the part's number."""
    match = SPLIT.fullmatch(path.name)
    return path.stem if match is None else match[1]


def model_name(path: Path, given: str) -> str:
    """What clients see unless a name is set: a GGUF file's, of a split model without the part's number; a folder's, be
    it a link to another; a hub name as it is, whose folder is named after a commit.

    path: where the files are; given: the name that they were found by.
    """
    if is_gguf(path):
        return as_text(_stem(path))
    return as_text(os.path.basename(os.path.abspath(given)) if os.path.isdir(given) else given)


def run_dtype(config: ModelConfig, setting: str, device: torch.device) -> torch.dtype:
    """The dtype a network runs in: the setting's, or the checkpoint's.

    float16 is bfloat16 on CPUs, whose operators have none of it: torch's own are slow, and a row's bits depend there on
    the rows beside it.
    """
    if setting != "auto":
        return DTYPES[setting]
    return torch.bfloat16 if device.type == "cpu" and config.dtype is torch.float16 else config.dtype
