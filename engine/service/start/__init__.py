"""Settings become a warm engine: folders, sizes, networks, drafters."""
