"""HTTP: the wire, over an engine that only plays scripts."""
