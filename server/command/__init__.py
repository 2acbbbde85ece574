"""The command `slipstream`: reading settings, running the server from start to exit, and the other subcommands."""
