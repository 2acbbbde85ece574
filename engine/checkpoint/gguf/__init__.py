"""GGUF files (ggml's format, github.com/ggml-org/ggml/blob/master/docs/gguf.md) as checkpoints of the usual kind.

`header.py` reads what a file says of itself, `model_config.py` makes a config of it as transformers would write it
(`config_parts.py` is what several architectures need for that, files ending in `_keys.py` what one needs), `names.py`,
`dialects.py` and `window_dialects.py` say under which names and in which form its tensors are known there, `files.py`
reads them.
"""
