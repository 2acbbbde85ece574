"""`python -m slipstream.server`: the same as the command `slipstream`."""

from slipstream.server.command.cli import main

main()
