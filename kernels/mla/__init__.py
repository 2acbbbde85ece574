"""Operator: multi-head latent attention. See `op.py`."""
