"""Which draft is verified, and how much of it: what tokens are worth against what they cost."""
