"""A short causal depthwise convolution over time, then SiLU."""
