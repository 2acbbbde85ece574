"""The part of a checkpoint that sees images: transformers' own tower and processor, behind the engine's `Vision`.

The only code that loads transformers' networks, and with them torch: import `opening` where a model is opened.
"""
