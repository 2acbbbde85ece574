"""The networks of draft heads, and how a folder's kind is recognised."""
