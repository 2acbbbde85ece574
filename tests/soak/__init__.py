"""A long run of everything at once against a real server: nothing is lost, no text differs, nothing leaks."""
