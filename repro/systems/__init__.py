"""The systems a cell can name, and how each is served."""

from repro.systems.backend import model_shape
from repro.systems.base import Assembled, Resources, System
from repro.systems.registry import SYSTEMS, system

__all__ = ["SYSTEMS", "Assembled", "Resources", "System", "model_shape", "system"]
