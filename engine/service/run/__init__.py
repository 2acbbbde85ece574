"""A running engine: its thread, the events of its requests, slots in files."""
