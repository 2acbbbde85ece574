"""A checkpoint's tensors: every one used once or refused, in whatever layout it was quantised."""
