"""Small Python functions to write from docstrings. The docstring names operations, which a glossary above it defines."""

import operator
import random

from repro.tasks.problem import Problem, Span, Split, check_span, draw, generate_split

TASK = "mini-code"

WORDS = ("zib", "tor", "lum", "bex", "dap", "fen", "gol", "hux", "jat", "kep", "nim", "pov", "quz", "rif", "sud", "tig")
OPERATORS = ("+=", "-=", "*=")
_APPLIED = {"+=": operator.add, "-=": operator.sub, "*=": operator.mul}
_VERBS = ("check", "keep", "clean", "test", "move", "read", "note", "fix")
_NOUNS = ("input", "file", "names", "cache", "list", "types", "docs", "log", "style", "tests")


def generate(
    seed: int,
    count: int,
    split: Split = "train",
    *,
    num_facts: Span = (8, 12),
    num_distractors: Span = (6, 20),
    num_used: Span = (2, 5),
    num_words: int = len(WORDS),
) -> list[Problem]:
    """The same arguments give the same problems on any machine. Answers are executable function bodies.

    Words come from the first ``num_words`` of ``WORDS``.
    """
    check_span("num_words", num_words, 1, len(WORDS))
    check_span("num_facts", num_facts, 1, num_words)
    check_span("num_distractors", num_distractors, 0, 1000)
    check_span("num_used", num_used, 1, 8)
    rng = random.Random(f"{TASK}:{seed}:{split}")
    return generate_split(count, split, lambda: _make(rng, num_facts, num_distractors, num_used, WORDS[:num_words]))


def apply(problem: Problem, x: int) -> int:
    statements = dict(problem.facts)
    for word in problem.used:
        _, name, value = statements[word].split()
        x = _APPLIED[name](x, int(value))
    return x


def _make(
    rng: random.Random, num_facts: Span, num_distractors: Span, num_used: Span, words: tuple[str, ...]
) -> Problem:
    glossary = {word: (rng.choice(OPERATORS), rng.randint(2, 9)) for word in rng.sample(words, draw(rng, num_facts))}
    used = rng.sample(list(glossary), min(draw(rng, num_used), len(glossary)))
    distractors = [f"# {rng.choice(_VERBS)} the {rng.choice(_NOUNS)}" for _ in range(draw(rng, num_distractors))]
    statements = {word: f"x {name} {value}" for word, (name, value) in glossary.items()}
    lines = [f"# {word}: {statement}" for word, statement in statements.items()] + distractors
    rng.shuffle(lines)
    words_in_order = [line[2:].split(":")[0] for line in lines if ":" in line]
    body = "".join(f"\n    # {word}\n    {statements[word]}" for word in used)
    answer = f"{body}\n    return x"
    header = "\n".join(lines)
    return Problem(
        task=TASK,
        kind=f"compose-{len(used)}",
        prompt=f'{header}\ndef f(x):\n    """Apply {", then ".join(used)}."""',
        answer=answer,
        final=answer,
        facts=tuple((word, statements[word]) for word in words_in_order),
        used=tuple(used),
        num_distractors=len(distractors),
    )
