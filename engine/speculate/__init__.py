"""Drafters, the chain that asks them, how long their drafts are, and the verification of what they guess."""
