"""Prompt text made from our own templates, for runs that need real tokens but no data set.

The text has the outer form of the data set it stands for (a programming task, a post to summarise,
a chat message) and about the asked number of words; its content means nothing, and no quality score
may be read from it.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

TextStyle = Literal["coding", "post", "chat", "math", "function"]

_SLOTS: dict[str, tuple[str, ...]] = {
    "thing": (
        "parcel",
        "sensor",
        "ticket",
        "bridge",
        "server",
        "orchard",
        "tram",
        "notebook",
        "crate",
        "library book",
        "lamp",
        "invoice",
        "rowing boat",
        "beehive",
        "recipe",
        "turbine",
        "puzzle",
        "garden bed",
        "ledger",
    ),
    "place": (
        "the harbour",
        "the old mill",
        "the north depot",
        "a small town",
        "the third floor",
        "the workshop",
        "the river bank",
        "the night market",
        "the archive",
        "the station",
        "the valley",
        "the greenhouse",
    ),
    "person": (
        "my sister",
        "our neighbour",
        "the foreman",
        "a friend from school",
        "my manager",
        "the landlord",
        "the new colleague",
        "my uncle",
        "the tenant upstairs",
        "our coach",
        "the clerk",
        "a cousin",
    ),
    "name": ("Mira", "Tobias", "Anneke", "Joon", "Leila", "Pavel", "Rosa", "Idris", "Hanna", "Mateo", "Keiko", "Olu"),
    "verb": ("sort", "count", "merge", "repair", "deliver", "compare", "label", "measure", "rotate", "store", "trade"),
    "adjective": ("heavy", "broken", "quiet", "late", "cheap", "narrow", "bright", "unused", "fragile", "distant"),
    "feeling": ("worried", "relieved", "annoyed", "curious", "tired", "hopeful", "confused", "embarrassed", "glad"),
    "topic": (
        "pension plans",
        "soil drainage",
        "train timetables",
        "sourdough",
        "tax returns",
        "bird migration",
        "database indexes",
        "watercolour",
        "heat pumps",
        "chess openings",
        "typography",
        "first aid",
    ),
    "letter": ("a", "b", "c", "x", "y", "p", "q", "s", "t", "w"),
    "array": ("values", "weights", "heights", "costs", "times", "scores", "gaps", "ranks"),
    "sub": ("relationships", "advice", "jobs", "personalfinance", "roommates", "family", "pets", "travel"),
    "number": tuple(str(n) for n in (2, 3, 4, 5, 6, 7, 8, 9, 11, 12, 15, 18, 20, 24, 30, 36, 45, 60, 75, 90, 120)),
    "power": ("10^3", "10^4", "10^5", "2*10^5", "10^6", "10^9", "10^18"),
}

_SENTENCES: dict[TextStyle, tuple[str, ...]] = {
    "coding": (
        "There are n {thing}s standing in a row at {place}, and the i-th of them has the value {array}[i].",
        "In one operation you may {verb} any two neighbouring {thing}s, which costs {number} coins.",
        "{name} wants to {verb} every {adjective} {thing} so that no two of them share the same {array}.",
        "You are given two integers {letter} and k together with an array {array} of length n.",
        "Find the smallest number of operations after which the array {array} becomes non-decreasing.",
        "If there is more than one answer, print the lexicographically smallest one; if there is none, print -1.",
        "The first line contains a single integer t (1 <= t <= {power}), the number of test cases.",
        "Each of the next n lines holds two integers, the {array} of a {thing} and the {number}-based index of {place}.",
        "It is guaranteed that the sum of n over all test cases does not exceed {power}.",
        "A {thing} is called {adjective} if its {array} is at least {number} times the median of the {array} before it.",
        "For example, with {letter} = {number} and {array} = [{number}, {number}, {number}] the answer is {number}.",
        "Two {thing}s are connected when the difference of their {array} is divisible by {number}.",
        "Constraints: 1 <= n <= {power}, 0 <= {array}[i] <= {power}, and {letter} is never larger than n.",
        "{name} starts at {place} and moves to the right by at most {number} cells in every second.",
        "Return the total {array} of the chosen {thing}s modulo 998244353.",
        "Note that a {thing} which was moved once may not be used to {verb} another {thing} later.",
    ),
    "post": (
        "So last week {person} borrowed my {thing} and left it at {place} without saying a word.",
        "I am {number} years old and have been living near {place} for about {number} months now.",
        "We talked about {topic} for {number} minutes and in the end I felt {feeling}.",
        "To be fair, {person} did offer to {verb} the {thing}, but it was already too {adjective}.",
        "I know this sounds {adjective}, but I have been {feeling} about it ever since.",
        "The rent went up by {number} percent and {person} still expects me to {verb} everything.",
        "Yesterday I found out that {person} had told everyone at {place} about the {thing}.",
        "My question is whether I should {verb} it quietly or bring it up with {person} again.",
        "For background, we met at {place} {number} years ago and we used to share an interest in {topic}.",
        "I tried to explain that the {adjective} {thing} was never mine in the first place.",
        "Nobody answered my messages for {number} days, and then {person} suddenly called.",
        "Part of me wants to move away from {place}, yet the other part is {feeling} to stay.",
        "I earn enough to pay for the {thing}, although {topic} costs me more every month.",
        "{person} says I am overreacting, and honestly I am too {feeling} to argue.",
    ),
    "chat": (
        "Please explain {topic} to me as if I had never heard of it.",
        "I have a list of {number} {adjective} {thing}s and I need to {verb} them before Friday.",
        "Rewrite the following paragraph so that it sounds less {adjective} and fits into {number} lines.",
        "The report says that the {thing} at {place} failed {number} times within {number} hours.",
        "What are the main arguments for and against {topic}, and which one would you choose?",
        "Here is what {person} wrote to me about the {thing}: it was {adjective}, and it arrived late at {place}.",
        "Give me {number} ideas for a talk about {topic}, each with one example from {place}.",
        "Translate this note for {name}, who is going to {verb} the {thing} tomorrow.",
        "Compare the two offers below: one costs {number} euros a month, the other {number} with a {adjective} {thing}.",
        "Then summarise the minutes of the meeting at {place}, where {name} and {name} discussed {topic}.",
        "If something is unclear, ask me no more than {number} questions before you answer.",
        "Write a short message to {person} saying that I am {feeling} about the {thing}.",
        "Also check whether the table of {array} adds up to {number} and point out any {adjective} entry.",
    ),
    "math": (
        "{name} has {number} {thing}s and buys {number} more at {place}.",
        "Each {thing} costs {number} dollars, and every third one is sold at half the price.",
        "On Monday {name} gives {number} of them to {person} and keeps the rest.",
        "Twice as many {adjective} {thing}s are left at {place} as {name} started with.",
        "It takes {number} minutes to {verb} one {thing}, with a break of {number} minutes in between.",
        "{name} saves {number} percent of the money and spends {number} dollars on {topic}.",
    ),
    "function": (
        "The list {array} holds at most {number} entries and may be empty.",
        "Entries smaller than {number} are ignored, and the order of the others is kept.",
        "If {letter} is negative the function returns an empty list.",
        ">>> solve([{number}, {number}, {number}], {number})\n    [{number}, {number}]",
        "Two neighbouring {array} that differ by less than {number} count as one.",
        "The result is the {array} of every {adjective} {thing} in rising order.",
    ),
}

_OPENINGS: dict[TextStyle, tuple[str, ...]] = {
    "coding": (
        "### Instructions: Read the task below and solve it in Python 3. Your program reads standard input, writes standard "
        "output and has to be right on every hidden test.\n\n### Question:\n{name} and the {adjective} {thing}s\n\n",
        "### Question: The {thing}s of {place}\nWrite one complete function in Python and nothing else.\n\n",
        "Complete the following programming task.\n\nTitle: {verb} the {adjective} {thing}s\n\n",
    ),
    "post": (
        "SUBREDDIT: r/{sub}\n\nTITLE: {person} and the {adjective} {thing}, what should I do?\n\nPOST: ",
        "SUBREDDIT: r/{sub}\n\nTITLE: I [{number}] am {feeling} about {topic}\n\nPOST: ",
        "SUBREDDIT: r/{sub}\n\nTITLE: How do I tell {person} about the {thing} at {place}?\n\nPOST: ",
    ),
    "chat": ("", "Hi, ", "I need your help. "),
    "math": ("",),
    "function": (
        'def solve({array}, {letter}):\n    """',
        'from typing import List\n\n\ndef solve({array}: List[int]):\n    """',
    ),
}

_CLOSINGS: dict[TextStyle, str] = {
    "coding": "\n\n### Answer, one code block and nothing else:\n",
    "post": "\n\nTL;DR:",
    "chat": "",
    "math": " How many are there in the end?",
    "function": '\n    """\n',
}


@dataclass(frozen=True, kw_only=True)
class PromptText:
    """``closing`` is kept whole when the body is cut to length: it asks for the answer."""

    body: str
    closing: str

    @property
    def text(self) -> str:
        return self.body + self.closing


def prompt_text(style: TextStyle, rng: random.Random, num_words: int) -> PromptText:
    """A prompt of at least ``num_words`` words, at most one sentence more (a short one is all opening)."""
    opening = _fill(rng.choice(_OPENINGS[style]), rng)
    closing = _CLOSINGS[style]
    wanted = num_words - len(opening.split()) - len(closing.split())
    return PromptText(body=opening + more_text(style, rng, wanted), closing=closing)


def more_text(style: TextStyle, rng: random.Random, num_words: int) -> str:
    """Sentences until there are ``num_words`` words; empty for 0 or less."""
    parts: list[str] = []
    have = 0
    sentences = _sentences(style, rng)
    while have < num_words:
        sentence = next(sentences)
        parts.append(sentence)
        have += len(sentence.split())
    return " ".join(parts)


def _sentences(style: TextStyle, rng: random.Random) -> Iterator[str]:
    """Every template once in random order, then again in another."""
    while True:
        templates = list(_SENTENCES[style])
        rng.shuffle(templates)
        for template in templates:
            sentence = _fill(template, rng)
            yield sentence[0].upper() + sentence[1:]


def _fill(template: str, rng: random.Random) -> str:
    return re.sub(r"\{(\w+)\}", lambda match: rng.choice(_SLOTS[match[1]]), template)
