"""Several engines behind one HTTP application: replicas, the ingress in front of them, and how streams move between them."""
