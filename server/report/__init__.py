"""What the server tells about itself and its requests: logs, metrics, traces, status."""
