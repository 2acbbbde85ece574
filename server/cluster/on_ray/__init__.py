"""The cluster as a Ray Serve application. Nothing else in the project imports Ray."""
