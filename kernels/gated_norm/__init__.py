"""RMS normalisation of heads, then a gate."""
