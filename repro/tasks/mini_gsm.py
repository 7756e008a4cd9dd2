"""Word problems in the style of grade-school maths: recall several facts from a story, then add or subtract them."""

import random
from functools import partial

from repro.tasks.problem import Problem, Span, Split, check_span, draw, generate_split

TASK, CHAIN, FAR, ROLL = "mini-gsm", "mini-chain", "mini-far", "mini-roll"
"""CHAIN asks for sums of many terms. Its answer spans several blocks, and each line needs the total of the line before. FAR is the
same with facts in the middle of 512 to 2,048 tokens. ROLL sums everybody's things, one after the other, in 200 tokens or more."""

NAMES = (
    *("Mia", "Tom", "Zoe", "Ben", "Ann", "Sam", "Leo", "Eva"),
    *("Max", "Ida", "Kim", "Jon", "Amy", "Dan", "Lily", "Omar"),
)
ITEMS = ("pens", "cups", "books", "coins", "hats", "maps", "keys", "cards")
_NOUNS = ("sky", "room", "road", "tea", "shop", "cat", "door", "tree", "lake", "bus", "game", "wind")
_ADJECTIVES = ("grey", "quiet", "long", "warm", "small", "old", "green", "cold", "late", "nice")


def generate(
    seed: int,
    count: int,
    split: Split = "train",
    *,
    num_facts: Span = (8, 12),
    num_distractors: Span = (6, 20),
    num_used: Span = (2, 3),
    listing_share: float = 0.0,
    drill_share: float = 0.0,
    drill_terms: Span = (2, 3),
    difference_share: float = 0.2,
    num_names: int = len(NAMES),
    is_far: bool = False,
    is_roll: bool = False,
    task: str = TASK,
) -> list[Problem]:
    """The same arguments give the same problems on any machine. A difference always uses two facts. Only for training, ``listing_share``
    of the problems ask for every fact of the story (up to 12), and ``drill_share`` ask to add ``drill_terms`` numbers of the question.
    Among the others, ``difference_share`` are a difference instead of a total, if possible. Names come from the first ``num_names`` of
    ``NAMES``. With ``is_far``, facts stand in the story's middle quarter. ``is_roll`` asks for all facts, in the order of ``NAMES``."""
    check_span("num_names", num_names, 1, len(NAMES))
    check_span("num_facts", num_facts, 1, num_names)
    check_span("num_distractors", num_distractors, 0, 1000)
    check_span("num_used", num_used, 1, len(NAMES))
    check_span("drill_terms", drill_terms, 2, 8)
    rng = random.Random(f"{task}:{seed}:{split}")

    def make() -> Problem:
        counts = {name: rng.randint(1, 5) for name in rng.sample(NAMES[:num_names], draw(rng, num_facts))}
        items = {name: rng.choice(ITEMS) for name in counts}
        used = rng.sample(list(counts), min(draw(rng, num_used), len(counts)))
        used = sorted(counts, key=NAMES.index) if is_roll else used
        training_kind = rng.random()
        if training_kind < drill_share:
            used = []
            kind, question, answer, final = _drill([rng.randint(1, 5) for _ in range(draw(rng, drill_terms))])
        elif training_kind < drill_share + listing_share:
            used = rng.sample(list(counts), min(len(counts), 12))
            kind, question, answer, final = f"listing-{len(used)}", *_listing(used, counts)
        elif len(used) >= 2 and counts[used[0]] != counts[used[1]] and rng.random() < difference_share:
            used = sorted(used[:2], key=lambda name: -counts[name])
            kind, question, answer, final = "difference", *_difference(used, counts)
        else:
            kind, question, answer, final = f"total-{len(used)}", *(_roll if is_roll else _total)(used, counts)
        facts = [f"{name} has {counts[name]} {items[name]}." for name in counts]
        story = _story(rng, facts, draw(rng, num_distractors), is_far=is_far)
        names = (sentence.split()[0] for sentence in story)
        return Problem(
            task=task,
            kind=kind,
            prompt=f"Story: {' '.join(story)} Question: {question}\nAnswer:",
            answer=answer,
            final=final,
            facts=tuple((name, f"{counts[name]} {items[name]}") for name in names if name in counts),
            used=tuple(used),
            num_distractors=len(story) - len(counts),
        )

    return generate_split(count, split, make)


def _story(rng: random.Random, facts: list[str], num_distractors: int, *, is_far: bool) -> list[str]:
    others = [f"The {rng.choice(_NOUNS)} was {rng.choice(_ADJECTIVES)}." for _ in range(num_distractors)]
    edge = 3 * num_distractors // 8 if is_far else 0
    middle = facts + others[2 * edge :]
    rng.shuffle(middle)
    return others[:edge] + middle + others[edge : 2 * edge]


def _total(used: list[str], counts: dict[str, int]) -> tuple[str, str, str]:
    who = f"does {used[0]}" if len(used) == 1 else f"do {_enumerate(used)}"
    total = counts[used[0]]
    answer = f" {used[0]} has {total}."
    for name in used[1:]:
        answer += f" {name} has {counts[name]}. {total} + {counts[name]} = {total + counts[name]}."
        total += counts[name]
    return f"How many things {who} have in total?", f"{answer} #### {total}", str(total)


def _roll(used: list[str], counts: dict[str, int]) -> tuple[str, str, str]:
    """Question, answer and total of a problem of mini-roll. Totals past 20 begin again at 1."""
    total, answer = counts[used[0]], f" {used[0]} has {counts[used[0]]} things."
    for name in used[1:]:
        new_total = (total + counts[name] - 1) % 20 + 1
        answer += f" {name} has {counts[name]} things. {total} + {counts[name]} = {new_total} in total."
        total = new_total
    return "How many things do all have in total?", f"{answer} #### {total}", str(total)


def _listing(used: list[str], counts: dict[str, int]) -> tuple[str, str, str]:
    answer = "".join(f" {name} has {counts[name]}." for name in used)
    return f"How many things have {_enumerate(used)}?", answer, answer


def _difference(used: list[str], counts: dict[str, int]) -> tuple[str, str, str]:
    more, fewer = used
    result = counts[more] - counts[fewer]
    answer = f" {more} has {counts[more]}. {fewer} has {counts[fewer]}. {counts[more]} - {counts[fewer]} = {result}. #### {result}"
    return f"How many more things does {more} have than {fewer}?", answer, str(result)


def _drill(numbers: list[int]) -> tuple[str, str, str, str]:
    total, answer = numbers[0], ""
    for number in numbers[1:]:
        answer += f" {total} + {number} = {total + number}."
        total += number
    expression = " + ".join(map(str, numbers))
    return f"drill {expression}", f"How much is {expression}?", f"{answer} #### {total}", str(total)


def _enumerate(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


generate_chain = partial(generate, num_used=(5, 8), drill_terms=(4, 8), difference_share=0.0, task=CHAIN)
"""Like ``generate``, but only with totals."""
generate_far = partial(generate_chain, num_distractors=(90, 391), num_used=(3, 5), is_far=True, task=FAR)
generate_roll = partial(generate_chain, num_facts=16, num_distractors=(0, 8), num_used=16, is_roll=True, task=ROLL)
