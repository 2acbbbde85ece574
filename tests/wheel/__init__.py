"""The wheel: what is in it, and that it works beside Hugging Face's `kernels` where it is installed, `make wheel`."""
