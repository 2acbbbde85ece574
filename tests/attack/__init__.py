"""What one caller can cost the others: attacks on a real server, measured at a neighbour of another key."""
