"""Questions behind system prompts that users share, in stages of Poisson arrivals: the load of inference-perf's shared-prefix data.

Name it as ``--workload repro.workloads.shared_prefix:SharedPrefix --arrivals trace``. Each request goes to a system prompt in turn.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from random import Random

from engines.cluster.sessions import Prefix
from engines.errors import UserError
from engines.knobs import Checked, Count, Tokens
from repro.workloads.rounds import RecordedRound, TracedSession

_STAGE = re.compile(r"(\d+(?:\.\d+)?)x(\d+(?:\.\d+)?)")
_BLOCK_TOKENS = 16


@dataclass(frozen=True, kw_only=True)
class SharedPrefix(Checked):
    stages: str = "8x60"
    """Requests/s times seconds, stages joined by +: 8x600+20x600."""
    question_tokens: Tokens = 447
    """Tokens of each question, which no other has."""
    system_prompt_tokens: Tokens = 100
    """Tokens of each system prompt, in front of the question."""
    num_system_prompts: Count = 9
    """System prompts."""
    output_tokens: Tokens = 248
    """Tokens of each answer."""

    def sessions(self, seed: int) -> Iterator[TracedSession]:
        prompt = self.system_prompt_tokens + self.question_tokens
        shared, names = self.system_prompt_tokens // _BLOCK_TOKENS, prompt // _BLOCK_TOKENS
        request = (RecordedRound(prompt, self.output_tokens),)
        for index, arrival_s in enumerate(self._arrivals(Random(seed))):
            # Names below are those of system prompts, each of which has as many.
            first = index % self.num_system_prompts * shared
            own = self.num_system_prompts * shared + index * (names - shared)
            blocks = *range(first, first + shared), *range(own, own + names - shared)
            yield TracedSession(request, arrival_s, prefix=Prefix(_BLOCK_TOKENS, (blocks,)))

    def _arrivals(self, rng: Random) -> Iterator[float]:
        """Each stage has as many as it asks for on the mean: Poisson arrivals that are told their number are uniform."""
        start_s = 0.0
        for rate, length_s in stages_of(self.stages):
            yield from sorted(start_s + length_s * rng.random() for _ in range(round(rate * length_s)))
            start_s += length_s


def stages_of(text: str) -> list[tuple[float, float]]:
    """Requests/s and seconds of each stage."""
    found = [_STAGE.fullmatch(stage.strip()) for stage in text.split("+")]
    stages = [(float(each[1]), float(each[2])) if each else (0.0, 0.0) for each in found]
    if not all(rate * length_s >= 1 for rate, length_s in stages):
        raise UserError(f"stages={text!r} are none: write requests/s x seconds, such as 8x600+20x600")
    return stages
