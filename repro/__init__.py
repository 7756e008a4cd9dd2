"""Experiment harness and command line. From Python: ``repro.run(...)``, ``sweep``, ``load`` and ``compare``. No part of the identity of runs."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from repro.api import compare, load, run, sweep

__all__ = ["compare", "load", "run", "sweep"]
__version__ = "0.2.0"

# Before torch computes, whoever imports this.
import_module("repro.runs.environment").settle()


def __getattr__(name: str) -> Any:
    """What is asked for by name is imported then: a command line that prints its help needs none of it."""
    if name in __all__:
        return getattr(import_module("repro.api"), name)
    raise AttributeError(f"module 'repro' has no attribute {name!r}")
