"""`python -m embershard`: the command line where no script was installed."""

from embershard.cli import main

main()
