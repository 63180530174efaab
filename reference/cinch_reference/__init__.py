"""Formats of cinch in numpy, from `docs/format.md` alone.

Each module follows one part of that page, and each function names its section. The code favours the
order of the page over speed.
"""

FORMAT_VERSION = 6
