"""Sums of many terms: mini-gsm's story, and an answer that spans several blocks, each line of which needs the total of the line before."""

from repro.tasks import mini_gsm
from repro.tasks.problem import Problem, Span, Split

TASK = "mini-chain"


def generate(
    seed: int,
    count: int,
    split: Split = "train",
    *,
    num_facts: Span = (8, 12),
    num_distractors: Span = (6, 20),
    num_used: Span = (5, 8),
    drill_share: float = 0.0,
    drill_terms: Span = (4, 8),
    num_names: int = len(mini_gsm.NAMES),
) -> list[Problem]:
    """``mini_gsm.generate`` of totals alone; the same arguments give the same problems on any machine."""
    return mini_gsm.generate(
        seed,
        count,
        split,
        num_facts=num_facts,
        num_distractors=num_distractors,
        num_used=num_used,
        drill_share=drill_share,
        drill_terms=drill_terms,
        difference_share=0.0,
        num_names=num_names,
        task=TASK,
    )
