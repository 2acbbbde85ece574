"""Text in, text out: tokenizer, chat templates, streaming detokenisation. Uses no tensors."""
