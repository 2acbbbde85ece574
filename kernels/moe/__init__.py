"""Mixture of experts: which experts a row goes to, and their gated feed-forward blocks."""
