"""Sparse changes of logits: bias and penalties."""
