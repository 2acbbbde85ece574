"""Unmodified client libraries against a real server: each in an environment of its own, `make clients`."""
