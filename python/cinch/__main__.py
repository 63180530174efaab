"""`python -m cinch`: the tool `cinch`, with `run` for Python programs. See `cinch.run.command`."""

from .run import main

main()
