"""Drafters that know nothing, for tests and benchmarks of the machinery."""
