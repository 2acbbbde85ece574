"""Text in, text out: tokenizer, chat templates, streaming detokenisation. Knows no tensors."""
