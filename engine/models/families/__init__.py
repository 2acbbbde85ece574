"""The model families, one file each: a config becomes a parts list."""
