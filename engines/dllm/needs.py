"""What a policy decides by besides lengths and steps: data that only a model gives, and that a simulation lacks.

A policy (a refresh rule, a scheduler, a method) says so in ``needs``. One that keeps state it says nothing of could hold such data all the
same, and would decide by a constant where no model runs: a rule has to be a frozen dataclass, or say what it needs.
"""

from __future__ import annotations

from collections.abc import Collection

from engines.dllm.config import GenerationConfig
from engines.errors import UserError, require

DATA = ("confidences", "ids")
"""Confidences of a step's tokens, and the ids themselves, prompts included."""


def check_simulated(kind: str, policy: object, *, keeps_state: bool = False) -> None:
    """Raise UserError for a policy that cannot be simulated; ``keeps_state`` where its kind does so to do its work."""
    name = policy.__name__ if isinstance(policy, type) else type(policy).__name__
    needs: Collection[str] | None = getattr(policy, "needs", None)
    is_set = isinstance(needs, Collection) and not isinstance(needs, str)
    if needs is not None and not (is_set and all(each in DATA for each in needs)):
        raise UserError(f"{kind} {name} has needs={needs!r}: give a set of {' and '.join(DATA)}")
    if needs:
        said = " and ".join(sorted(needs))
        raise UserError(
            f"{kind} {name} needs {said}, which a simulation does not know, they depend on the model: use --executor torch"
        )
    if needs is None and not keeps_state and not _is_constant(policy):
        raise UserError(
            f"{kind} {name} may change while it runs, and a simulation has no data that it could change by: make it a frozen "
            f"dataclass, or say what it needs (needs = frozenset(), or of {' and '.join(DATA)})"
        )


def check_simulated_generation(generation: GenerationConfig) -> None:
    """Raise UserError for a request of which only the model knows how many steps it takes, or what they cost."""
    reasons = {
        "stop_at_eos": "where a request ends depends on the model",
        "threshold": "how many tokens pass it depends on the model",
        "factor": "how many tokens pass it depends on the model",
        "cfg_scale": "its second forward has no cost here",
    }
    for name, reason in reasons.items():
        value = getattr(generation, name)
        require(not value, f"{name}={value} cannot be simulated, {reason}: use --executor torch")


def _is_constant(policy: object) -> bool:
    """Whether it is a frozen dataclass of values that cannot change either."""
    try:
        hash(policy)
    except TypeError:
        return False
    return bool(getattr(getattr(policy, "__dataclass_params__", None), "frozen", False))
