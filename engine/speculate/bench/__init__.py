"""Drafters that guess without reading the text, for tests and benchmarks of the machinery."""
