"""Where a model's files are: a local folder or GGUF file, or the local copy of a hub repository."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from slipstream.engine.checkpoint.gguf.files import SPLIT, split_files
from slipstream.engine.errors import LoadError
from slipstream.engine.models.reading.config import DTYPES, ModelConfig
from slipstream.engine.naming import GGUF, is_gguf, model_path

CHECKPOINT = ("*.json", "*.safetensors", "*.jinja")
CONFIGS = ("config.json", "generation_config.json")
# Of a repository of GGUF files alone the first of these is taken if the name asks for none, as llama.cpp does.
QUANTS = ("Q4_K_M", "Q8_0")
PROJECTOR = "mmproj"  # what files with encoders of media begin with


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
    except (OSError, ValueError) as error:
        raise LoadError(f"{name}: no such folder or file, and the hub did not give it: {error}") from error


def _asked_for(name: str) -> tuple[str, str | None]:
    """The repository, and the quantisation or the file that is asked for."""
    if name.count("/") == 2:
        organisation, repository, file = name.split("/")
        return f"{organisation}/{repository}", file
    repository, _, wanted = name.partition(":")
    return repository, wanted or None


def _downloaded(repository: str, wanted: str | None, patterns: Sequence[str]) -> Path:
    from huggingface_hub import HfApi, hf_hub_download, snapshot_download

    listed = HfApi().list_repo_files(repository)
    has = {suffix: any(file.endswith(suffix) for file in listed) for suffix in (GGUF, ".safetensors")}
    if wanted is None and (has[".safetensors"] or not has[GGUF]):
        return Path(snapshot_download(repository, allow_patterns=list(patterns)))
    file = chosen_file(repository, wanted, listed)
    first, *rest = split_files(Path(file))
    path = Path(hf_hub_download(repository, str(first)))
    for one in rest:
        hf_hub_download(repository, str(one))
    return path


def chosen_file(repository: str, wanted: str | None, listed: Sequence[str]) -> str:
    """The GGUF file of a repository that is meant, the first of a split model. Raises `LoadError` naming what is there.

    wanted: a quantisation, which is part of the file's name, or the file; None: the usual quantisation.
    """
    models = [
        file
        for file in sorted(listed)
        if file.endswith(GGUF)
        and not Path(file).name.startswith(PROJECTOR)
        and split_files(Path(file))[0] == Path(file)
    ]
    for asked in (wanted,) if wanted is not None else QUANTS:
        found = [file for file in models if asked.lower() in Path(file).name.lower()]
        # Of Q4_K_M and UD-Q4_K_M the shorter name is the plain one.
        if found:
            return min(found, key=lambda file: (len(Path(file).name), file))
    if wanted is None and models:
        return models[0]
    raise LoadError(
        f"{repository}: has no GGUF file {'' if wanted is None else repr(wanted) + ' '}for a model;"
        f" it has {', '.join(models) or 'none'}"
    )


def model_name(path: Path) -> str:
    """What clients see unless a name is set: the folder's or the file's, of a split model without the part's number."""
    if not is_gguf(path):
        return path.resolve().name
    match = SPLIT.fullmatch(path.name)
    return path.stem if match is None else match[1]


def run_dtype(config: ModelConfig, setting: str) -> torch.dtype:
    """The dtype a network runs in: the setting's, or the checkpoint's."""
    return config.dtype if setting == "auto" else DTYPES[setting]
