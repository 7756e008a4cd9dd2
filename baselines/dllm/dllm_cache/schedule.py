"""Which rows a forward of dLLM-Cache recomputes; plain policy, no torch.

Each request counts its steps from 1, one per forward, and blocks do not reset the count. The members of a static batch start together, so
they share one count.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, NamedTuple

from engines.errors import require
from engines.knobs import Checked, Only, Range

if TYPE_CHECKING:  # the command line reads its options from this module
    from engines.dllm.plan import Request, StepPlan

Steps = Annotated[int, Range(1, 10**6)]
GUIDED_STEPS = 5
"""For a request's first steps guidance is always computed anew, whatever ``cfg_interval`` says, as published."""


class CacheStep(NamedTuple):
    """Rows that one forward refreshes in every layer but the first, which always recomputes all rows.

    Counts are per member of a batch, whose prompts are padded to ``prompt_width`` and whose responses all have ``gen_length`` rows.
    """

    prompt_width: int
    gen_length: int
    prompt: bool
    """Whether to recompute all prompt rows."""
    response: bool
    """Whether to recompute all response rows."""
    compares: bool
    """Whether to compute every response row's value anew and compare it with the one before."""
    num_selected: int
    """How many response rows to recompute because their value changed most."""

    @property
    def total_width(self) -> int:
        return self.prompt_width + self.gen_length

    @property
    def fresh_rows(self) -> int:
        """Rows that are wholly refreshed, keys and values included."""
        return self.prompt * self.prompt_width + self.response * self.gen_length

    @property
    def query_rows(self) -> int:
        """Rows that get a new query, attention output and MLP output."""
        return self.fresh_rows + self.num_selected


@dataclass(frozen=True, kw_only=True)
class FeatureCacheConfig(Checked):
    """Settings of the feature caches. Defaults are those of the published demo, which the paper's comparison names (100 and 7)."""

    prompt_interval: Steps = 100
    """dLLM-Cache: steps between refreshes of the prompt."""
    gen_interval: Steps = 7
    """dLLM-Cache: steps between refreshes of the response."""
    transfer_ratio: Annotated[float, Range(0, 1)] = 0.25
    """dLLM-Cache: share of the response recomputed between its refreshes; 0 recomputes nothing."""
    cfg_interval: Annotated[Steps, Only(family="llada")] = 1
    """dLLM-Cache: steps between forwards without the prompt, for cfg_scale."""

    def refresh_guidance(self, t: int) -> bool:
        return t <= GUIDED_STEPS or (t - 1) % self.cfg_interval == 0

    def step(self, t: int, prompt_width: int, gen_length: int) -> CacheStep:
        response = (t - 1) % self.gen_interval == 0
        compares = not response and self.transfer_ratio > 0
        return CacheStep(
            prompt_width=prompt_width,
            gen_length=gen_length,
            prompt=(t - 1) % self.prompt_interval == 0,
            response=response,
            compares=compares,
            # A share of the whole response, finished blocks included; may be 0.
            num_selected=int(gen_length * self.transfer_ratio) if compares else 0,
        )


class BatchClock:
    """Counts the forwards of the running static batch. Forwards without its prompts (guidance) have a clock of their own."""

    def __init__(self, config: FeatureCacheConfig) -> None:
        self.config = config
        self.t = 0
        self._gen_length = 0

    def tick(self, plan: "StepPlan") -> CacheStep:
        assert plan.pad_to is not None, "dLLM-Cache runs static batches only"
        if plan.admitted:
            assert len(plan.admitted) == len(plan.items), "a static batch starts as a whole"
            lengths = {request.generation.gen_length for request in plan.admitted}
            assert len(lengths) == 1, "members of a batch share gen_length"
            self.t, self._gen_length = 0, lengths.pop()
        self.t += 1
        return self.config.step(self.t, plan.pad_to - self._gen_length, self._gen_length)


def refuse_unsupported(request: "Request") -> None:
    generation = request.generation
    require(
        not generation.is_parallel,
        "{}={} has no meaning for dLLM-Cache: leave it out".format(*generation.parallel_by or ("", "")),
    )
