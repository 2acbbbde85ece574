"""The gated delta rule: a recurrent state per head, moved by one rank-one update per token."""
