"""Drafters that run a network: draft models, heads on the target's streams, block drafters."""
