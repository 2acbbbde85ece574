"""llama-server's own endpoints that OpenAI's API does not have: tokens to and from text, slots to and from files."""
