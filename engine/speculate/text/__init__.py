"""Text drafters: from the grammar, from the expected text, from the suffixes of what has been written."""
