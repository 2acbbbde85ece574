"""The command `slipstream`: settings, the server's life, the other subcommands."""
