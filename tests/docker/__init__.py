"""The container files: read, linted, and followed without docker."""
