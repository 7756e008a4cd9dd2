"""``python -m repro``: the command line for a checkout that is not installed."""

from repro.cli import main

main()
