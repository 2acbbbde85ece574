"""How families of models write thinking and tool calls, one file per family."""
