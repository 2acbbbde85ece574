"""`python -m slipstream.server`."""

from slipstream.server.command.cli import main

main()
