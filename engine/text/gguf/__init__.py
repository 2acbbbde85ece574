"""Text out of the key-values of a GGUF file: vocabulary, splits, special tokens, chat templates."""
