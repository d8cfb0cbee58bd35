"""`python -m pdpsgd` is the command line."""

from pdpsgd.cli import main

main()
