"""Which kind of draft a folder holds, by what its config and its tensors say."""

from __future__ import annotations

from pathlib import Path

import torch

from slipstream.engine.checkpoint.weights import Weights
from slipstream.engine.errors import UnsupportedModel
from slipstream.engine.models.heads import dspark, mtp
from slipstream.engine.models.reading.fields import Fields

SPECULATORS = {"eagle3": "draft-eagle3", "dflash": "draft-dflash", "dspark": "draft-dspark"}
EAGLE3_LAYERS = ("midlayer", "layers.0")


def kind_of(path: Path | str) -> str:
    """`draft-eagle3`, `draft-mtp`, `draft-dflash`, `draft-dspark` or `draft-model`.

    A whole model is a draft model even if it brings an MTP head of its own. Raises `LoadError` if the folder
    cannot be read and `UnsupportedModel` if it holds none of these.
    """
    folder = Path(path)
    weights = Weights(folder, torch.float32, torch.device("cpu"))  # opened, not read
    fields = Fields({}, str(folder))
    if (folder / "config.json").exists():
        fields = Fields.read(folder / "config.json")
    if fields.has("speculators_model_type"):
        name = fields.text("speculators_model_type")
        if name not in SPECULATORS:
            raise fields.refuse("speculators_model_type", f"must be one of {', '.join(SPECULATORS)}")
        return SPECULATORS[name]
    if dspark.MARKOV in weights:
        return "draft-dspark"
    if "fc.weight" in weights and "hidden_norm.weight" in weights:
        return "draft-dflash"
    if "fc.weight" in weights and any(f"{layer}.hidden_norm.weight" in weights for layer in EAGLE3_LAYERS):
        return "draft-eagle3"
    if mtp.is_whole_model(weights.names):
        return "draft-model"
    if mtp.mtp_tensors(weights.names, 0):
        return "draft-mtp"
    raise UnsupportedModel(f"{folder}: neither a model nor a draft head of a kind that is known here")
