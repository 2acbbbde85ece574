"""Layers shared by all model families: plain functions of tensors and a cache, built from a checkpoint."""
