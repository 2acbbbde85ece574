"""Linear layers over weights packed once."""
