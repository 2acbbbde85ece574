"""Images that requests show: where they come from, and their pixels, which a process of its own decodes."""
