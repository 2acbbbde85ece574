"""Grammars for replies: compiled in trial by a process with limits, kept per tenant, asked for masks token by token."""
