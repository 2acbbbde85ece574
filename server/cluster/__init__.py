"""Several engines behind one HTTP application: replicas, the ingress before them, and how streams move between them."""
