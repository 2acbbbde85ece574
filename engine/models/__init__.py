"""Model families: a strict config reader, one parts list per family, a registry of architecture names."""
