"""Gates: activations that multiply another tensor element by element."""
