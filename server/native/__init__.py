"""llama-server's own endpoints around tokens and templates."""
