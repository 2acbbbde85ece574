"""OpenAI's Responses API: items instead of messages, replies that are kept and can be gone on from."""
