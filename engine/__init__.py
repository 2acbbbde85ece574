"""Everything between a typed request and a kernel call. Runs without pydantic or a web framework."""
