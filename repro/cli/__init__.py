"""The ``repro`` command. Heavy imports happen inside the commands that need them."""

from repro.cli.main import main

__all__ = ["main"]
