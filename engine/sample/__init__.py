"""From a logits row to a token: one order of processing, noise keyed by (seed, position)."""
