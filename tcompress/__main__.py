"""Runs the command line: `python -m tcompress`."""

from __future__ import annotations

from tcompress.cli.main import main

if __name__ == "__main__":
    main()
