"""How long a data set's prompts are by default: in this process and at a server's, by the same rule."""

from __future__ import annotations

EMBEDDED_CONTEXT = 768
"""Tokens of the embedded model, whose tokenizer makes the prompts for a server that does not say how many it takes."""
MIN_PROMPT_LEN = 8
"""Tokens; shorter ones are drawn out to it."""
SHORT_CONTEXT = 1024
SHORT_SCALE = 0.25


def length_scale_for(context: int) -> float:
    """1, the data set's own lengths, where a model takes prompts so long."""
    return SHORT_SCALE if context < SHORT_CONTEXT else 1.0
