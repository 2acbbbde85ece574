"""Drafters that read text: the grammar, the expected text, the suffixes of what has been written."""
