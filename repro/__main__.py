"""``python -m repro``: the command where the package is not installed."""

from repro.cli import main

main()
