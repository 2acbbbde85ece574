"""Causal attention of ragged spans over paged keys and values."""
