"""`python -m server`."""

from server.cli import main

main()
