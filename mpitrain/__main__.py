"""`python -m mpitrain` is the command line."""

from mpitrain.cli import main

main()
