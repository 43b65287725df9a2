"""`python -m embershard`: the command line of this interpreter's environment."""

from embershard.cli import main

main()
