"""The knobs that every cell of prefill instances has; None takes the platform's value, or the data set's."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from engines.errors import require
from engines.knobs import Only, Range, Seconds, check_fields
from engines.laps.cluster import Cache
from engines.laps.cost import PrefillConstants
from repro.workloads.knobs import ArrivalKnobs
from repro.workloads.sessions.workload import Source

Decode = Literal["none", "apart", "mixed"]
SIMULATED = Only(executor="roofline")
"""What means nothing to a measured instance."""
Clients = Annotated[int, Range(1, 10**5)]
_MaybeClients = Annotated[int, Range(0, 10**5)]


@dataclass(frozen=True, kw_only=True)
class InstanceKnobs(ArrivalKnobs):
    model: str | None = None
    """A shape by its name."""
    num_instances: int = 1
    """Instances, a GPU each."""
    constants: Annotated[PrefillConstants, SIMULATED] = field(default_factory=PrefillConstants)
    cache: Cache = "shared"
    """Where histories are cached: shared by all instances, or on the instance that computed them (instance)."""
    reprefills_answer: bool = False
    """Compute the last answer again with the next turn, as where it was decoded elsewhere."""
    decode: Annotated[Decode, SIMULATED] = "none"
    """none: turns end with their first token. apart: answers are decoded on as many other GPUs; mixed: on the instances; with
    either the next turn comes after the whole answer."""
    num_prompts: Annotated[int, Range(1, 10**5)] | None = None
    """Turns."""
    clients: Clients | None = None
    """Conversations held at once, one after the other by each client, in a closed loop; a rate is of turns, whatever became of those
    before."""
    think_s: Seconds = 0.0
    """Seconds a client thinks before its next turn."""
    answer_tokens: Annotated[int, Range(1, 10**6)] | None = None
    """Tokens of every answer."""
    dataset_source: Source | None = None
    """embedded or local; local where there is a file."""
    dataset_path: str | None = None
    """A file of recorded conversations."""
    min_tokens: Annotated[int, Range(1, 10**6)] | None = None
    """Only prompts of so many tokens or more."""
    max_tokens: Annotated[int, Range(1, 10**6)] | None = None
    """Only prompts of so many tokens or fewer."""
    long_clients: _MaybeClients | None = None
    """Clients of a closed loop of prompts above 1,000 tokens (LAPS Figures 1 and 3)."""
    short_clients: _MaybeClients | None = None
    """Clients of a closed loop of prompts below 64 tokens beside them."""
    slo_ttft_s: Annotated[float, Range(1e-6, 1e6)] | None = None
    """Objective of the time to the first token, in seconds."""
    deadlines: bool = True
    """Whether policies know the objective; without, they serve offline."""
    transient: bool = False
    """Accept a rate that the instances cannot serve."""

    def __post_init__(self) -> None:
        check_fields(self)
        require(
            self.min_tokens is None or self.max_tokens is None or self.min_tokens <= self.max_tokens,
            f"min_tokens={self.min_tokens} is more than max_tokens={self.max_tokens}: exchange them",
        )
