"""What a checkpoint says of itself: config.json and generation_config.json of a folder, or a GGUF file's metadata."""

from __future__ import annotations

from pathlib import Path

from slipstream.engine.checkpoint.gguf.files import is_gguf, read_configs
from slipstream.engine.models.reading.fields import Fields

CONFIG, GENERATION = "config.json", "generation_config.json"


def read_documents(path: Path) -> tuple[Fields, Fields]:
    """(config, defaults of generation, empty without any). Raises `LoadError`, `UnsupportedModel` for GGUF files.

    path: a checkpoint folder, a GGUF file, or a config file, which other files may lie beside.
    """
    if is_gguf(path):
        config, generation = read_configs(path)
        return Fields(config, str(path)), Fields(generation, str(path))
    file = path if path.is_file() else path / CONFIG
    beside = file.parent / GENERATION
    return Fields.read(file), Fields.read(beside) if beside.exists() else Fields({}, str(beside))


def has_config(path: Path) -> bool:
    """Whether a checkpoint has a config; a head that came alone may have none."""
    return is_gguf(path) or (path / CONFIG).exists()
