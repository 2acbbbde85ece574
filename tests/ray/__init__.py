"""Tests and measurements of the Ray application, in an environment of their own: `make ray`."""
