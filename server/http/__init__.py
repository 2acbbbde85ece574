"""The layers that every request passes, whatever its route: connection, limits, API keys, bodies, errors, streams."""
