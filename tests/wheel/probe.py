"""Run by the Python of an environment that has our wheel and Hugging Face's `kernels`: each name finds its own package.

transformers imports `kernels` where it finds one of a version that it accepts; before our packages lay below
`slipstream`, it could find ours.
"""

import importlib.metadata
import sys
from pathlib import Path

import transformers.integrations.hub_kernels as hub_kernels
import transformers.models.qwen3.modeling_qwen3  # its layers are decorated with what `kernels` has
from transformers.utils.import_utils import is_kernels_available

import kernels
import slipstream.engine.service.start.launch
import slipstream.kernels
import slipstream.server.http.app

for module in (kernels, slipstream, slipstream.kernels, transformers):
    place = Path(module.__file__ or "")
    assert place.is_relative_to(sys.prefix), f"{module.__name__} comes from {place}"
assert importlib.metadata.packages_distributions()["kernels"] == ["kernels"]
assert kernels.__version__ == importlib.metadata.version("kernels")
assert is_kernels_available(), "transformers does not accept this version of kernels: pin another pair"
assert hub_kernels.get_kernel_hub is kernels.get_kernel
assert slipstream.kernels is not kernels
