"""Logits to token ids: truncation, noise, pick."""
