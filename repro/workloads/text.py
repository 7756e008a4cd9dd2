"""Prompt text made from our own templates (``text.yaml``), for runs that need real tokens but no data set.

The text has the outer form of the data set it stands for (a programming task, a post to summarise,
a chat message) and about the asked number of words; its content means nothing, and no quality score
may be read from it.
"""

import random
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from engines.errors import UserError
from repro.files import read_yaml
from repro.workloads.knobs import TextStyle


@dataclass(frozen=True, kw_only=True)
class PromptText:
    """``closing`` is kept whole when the body is cut to length: it asks for the answer."""

    body: str
    closing: str

    @property
    def text(self) -> str:
        return self.body + self.closing


def prompt_text(style: TextStyle, rng: random.Random, num_words: int) -> PromptText:
    """Makes a prompt of at least ``num_words`` words, at most one sentence more (a short one is all opening)."""
    form = _templates()["styles"][style]
    opening, closing = _fill(rng.choice(form["openings"]), rng), form["closing"]
    wanted = num_words - len(opening.split()) - len(closing.split())
    return PromptText(body=opening + more_text(style, rng, wanted), closing=closing)


def more_text(style: TextStyle, rng: random.Random, num_words: int) -> str:
    """Makes sentences until there are ``num_words`` words; none for 0 or less."""
    parts: list[str] = []
    have = 0
    sentences = _sentences(style, rng)
    while have < num_words:
        sentence = next(sentences)
        parts.append(sentence)
        have += len(sentence.split())
    return " ".join(parts)


def _sentences(style: TextStyle, rng: random.Random) -> Iterator[str]:
    """Yields every template once in random order, then again in another."""
    while True:
        templates = list(_templates()["styles"][style]["sentences"])
        rng.shuffle(templates)
        for template in templates:
            sentence = _fill(template, rng)
            yield sentence[0].upper() + sentence[1:]


def _fill(template: str, rng: random.Random) -> str:
    slots = _templates()["slots"]
    return re.sub(r"\{(\w+)\}", lambda match: rng.choice(slots[match[1]]), template)


@cache
def _templates() -> Mapping[str, Any]:
    found: Mapping[str, Any] = read_yaml(Path(__file__).with_name("text.yaml"))
    return found


def prompt_ids(
    encode: Callable[[str], list[int]], style: TextStyle, rng: random.Random, prompt_len: int, own_ids: list[int] | None
) -> tuple[int, ...]:
    """Makes exactly ``prompt_len`` ids: of the row's own text, cut at its end or continued by the generator,
    else of a generated prompt, whose closing words stay where they take no more than half."""
    closing_ids: list[int] = []
    if own_ids is not None:
        body_ids = list(own_ids)
    else:
        prompt = prompt_text(style, rng, prompt_len)
        body_ids = list(encode(prompt.body))
        if prompt.closing:
            closing_ids = list(encode(prompt.closing))
        if 2 * len(closing_ids) > prompt_len:
            closing_ids = []
    body_len = prompt_len - len(closing_ids)
    while len(body_ids) < body_len:
        added = encode(" " + more_text(style, rng, body_len - len(body_ids)))
        if not added:
            raise UserError("the tokenizer returned no ids for English text: use the model's own tokenizer")
        body_ids.extend(added)
    return tuple(body_ids[:body_len] + closing_ids)
