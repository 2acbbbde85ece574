"""Device memory of a slot's state, addressed by page: pages, prefix sharing, stores."""
