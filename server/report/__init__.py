"""What the server reports about itself and its requests: logs, metrics, traces, status."""
