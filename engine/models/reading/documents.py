"""What a checkpoint says of itself: the JSON files of a folder, or a GGUF file's metadata in their form."""

from __future__ import annotations

from pathlib import Path

from slipstream.engine.checkpoint.gguf.files import read_configs, read_keys, split_files
from slipstream.engine.errors import LoadError
from slipstream.engine.models.reading.fields import Fields
from slipstream.engine.naming import GGUF, is_gguf
from slipstream.engine.text.gguf.gguf_text import gguf_source
from slipstream.engine.text.tokenizer_source import TokenizerSource, folder_source

CONFIG, GENERATION = "config.json", "generation_config.json"


def read_documents(path: Path) -> tuple[Fields, Fields]:
    """(config, defaults of generation, empty without any). Raises `LoadError`, `UnsupportedModel` for GGUF files.

    path: a checkpoint folder, a GGUF file, or a config file, which other files may lie beside.
    """
    if is_gguf(path):
        config, generation = read_configs(path)
        return Fields(config, str(path)), Fields(generation, str(path))
    file = path if path.is_file() else path / CONFIG
    if not file.exists() and (found := sorted(path.glob(f"*{GGUF}"))):
        raise LoadError(f"{path}: a folder with GGUF files and no {CONFIG}; name a file, such as {found[0]}")
    beside = file.parent / GENERATION
    return Fields.read(file), Fields.read(beside) if beside.exists() else Fields({}, str(beside))


def checkpoint_files(path: Path) -> tuple[list[Path], list[Path]]:
    """The files that a checkpoint is made of: its config if that lies apart, and those with weights."""
    if is_gguf(path):
        return [], split_files(path)
    return [path / CONFIG], sorted(path.glob("*.safetensors"))


def text_source(path: Path) -> TokenizerSource:
    """What a checkpoint's tokenizer and chat templates are made of. Raises `LoadError`, `UnsupportedModel`."""
    return gguf_source(read_keys(path).metadata, str(path)) if is_gguf(path) else folder_source(path)


def has_config(path: Path) -> bool:
    """Whether a checkpoint has a config; a head that came alone may have none."""
    return is_gguf(path) or (path / CONFIG).exists()
