"""How families of models write thinking and tool calls: a file per family, and the parsers and grammars they share."""
