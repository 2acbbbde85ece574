"""What every request passes: connection, limits, keys, bodies, errors, event streams."""
