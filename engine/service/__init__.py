"""The engine behind `AsyncEngine`: its thread, its streams, and how it is launched from settings."""
