"""Experiment harness and command line. From Python: ``repro.run(...)``, ``sweep``, ``load`` and ``compare``. Not part of a run's
identity."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from repro.api import compare, load, run, sweep

__all__ = ["compare", "load", "run", "sweep"]
__version__ = "0.2.0"

# This must happen before torch computes, whichever module imports ``repro``.
import_module("repro.runs.environment").settle()


def __getattr__(name: str) -> Any:
    """Imports a name on first use, so that a command line that only prints its help stays fast."""
    if name in __all__:
        return getattr(import_module("repro.api"), name)
    raise AttributeError(f"module 'repro' has no attribute {name!r}")
