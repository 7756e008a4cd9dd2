"""Sums of many terms: mini-gsm's story, and an answer that spans several blocks, each line of which needs the total of the line before."""

from functools import partial

from repro.tasks import mini_gsm

TASK = "mini-chain"

generate = partial(mini_gsm.generate, num_used=(5, 8), drill_terms=(4, 8), difference_share=0.0, task=TASK)
"""``mini_gsm.generate`` of totals alone."""
