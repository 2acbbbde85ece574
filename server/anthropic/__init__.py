"""Anthropic's dialect, the Messages API: a chat under other names, and its replies as blocks of content."""
