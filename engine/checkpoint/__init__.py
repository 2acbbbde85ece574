"""A checkpoint's tensors, in whatever layout they were quantised: every tensor is used once, or the load is refused."""
