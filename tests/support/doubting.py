"""A refresh rule that decides by what a request's steps did."""

from dataclasses import dataclass

from engines.dllm.config import Phase, Seen


@dataclass
class OnDoubt:
    below: float = 0.9
    caches = True
    window = "block"
    needs = frozenset({"confidences"})
    doubts = False

    def see(self, seen: Seen) -> None:
        self.doubts = min(seen.confidences, default=1.0) < self.below

    def phase(self, step_in_block: int) -> Phase:
        return Phase.BUILD if step_in_block == 0 or self.doubts else Phase.REUSE
