"""python -m llamadiff."""

from llamadiff.cli import main

main()
