"""A workload: requests with arrival times, prompt lengths and seeds, and their origin.

Random streams are independent: lengths do not depend on arrivals, and the first n requests of a longer
workload are the same requests. Prompt text from our templates (``text.yaml``) has the form and length of real prompts, but
no meaning: use it for no quality score.
"""

import random
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Annotated, Any

import numpy as np

from engines.dllm.config import GenerationConfig
from engines.dllm.plan import Request
from engines.errors import UserError, require
from engines.knobs import Checked, Range, Seed
from repro.files import read_yaml
from repro.workloads.card import Origin, Provenance, checksum, chosen_file, embedded_origin
from repro.workloads.dataset import DatasetCard, hub_origin, load_card
from repro.workloads.draws import ArrivalConfig, Ints, arrival_times, derive_seed
from repro.workloads.knobs import SourceKind, TextStyle, TimeUnit
from repro.workloads.rounds import RecordedRound, Trace, TracedSession
from repro.workloads.served import PREFIXES_UNUSED, Traced, take, take_from

# -- text -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class PromptText:
    """A generated prompt. If we cut the body to length, ``closing`` stays whole, because it asks for the answer."""

    body: str
    closing: str

    @property
    def text(self) -> str:
        return self.body + self.closing


def prompt_text(style: TextStyle, rng: random.Random, num_words: int) -> PromptText:
    """Make a prompt of at least ``num_words`` words, with at most one sentence more. A short prompt is only an opening."""
    form = _templates()["styles"][style]
    opening, closing = _fill(rng.choice(form["openings"]), rng), form["closing"]
    remaining = num_words - len(opening.split()) - len(closing.split())
    return PromptText(body=opening + more_text(style, rng, remaining), closing=closing)


def more_text(style: TextStyle, rng: random.Random, num_words: int) -> str:
    """Make sentences until there are ``num_words`` words, or none for 0 or less."""
    parts: list[str] = []
    count = 0
    sentences = _sentences(style, rng)
    while count < num_words:
        sentence = next(sentences)
        parts.append(sentence)
        count += len(sentence.split())
    return " ".join(parts)


def _sentences(style: TextStyle, rng: random.Random) -> Iterator[str]:
    """Yield a sentence from every template once in random order, then again in other orders."""
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
    templates: Mapping[str, Any] = read_yaml(Path(__file__).with_name("text.yaml"))
    return templates


def prompt_ids(
    encode: Callable[[str], list[int]], style: TextStyle, rng: random.Random, prompt_len: int, own_ids: list[int] | None
) -> tuple[int, ...]:
    """Make exactly ``prompt_len`` ids. They come from the row's own text, cut at its end or continued by the generator, or else
    from a generated prompt. This keeps its closing words if they take at most half."""
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


# -- workloads --------------------------------------------------------------------------------------------

Encode = Callable[[str], list[int]]
"""Encodes text to token ids without adding special tokens, so that a text can be encoded in pieces."""


@dataclass(frozen=True, kw_only=True)
class WorkloadConfig(Checked):
    """The requests to make. ``length_scale`` multiplies every prompt length before clipping to
    [``min_prompt_len``, ``max_prompt_len``]. ``fixed_prompt_len`` replaces all lengths."""

    dataset: str
    num_requests: Annotated[int, Range(1, 10**5)]
    seed: Seed
    arrivals: ArrivalConfig
    max_prompt_len: int
    min_prompt_len: int = 8
    source: SourceKind = "auto"
    dataset_path: str | None = None
    time_unit: TimeUnit | None = None
    """The unit of times in ``dataset_path``, if its columns do not say it."""
    length_scale: Annotated[float, Range(above=0, most=1e3)] = 1.0
    fixed_prompt_len: int | None = None
    may_replace_arrivals: bool = True
    """Whether ``arrivals`` may replace a file's own arrival times. If not, such a file raises UserError."""


@dataclass(frozen=True, kw_only=True)
class LengthStats:
    """Statistics of prompt lengths in tokens. Percentile p is sorted[int(p * n)]."""

    n: int
    mean: float
    p50: int
    p90: int
    max: int


@dataclass(frozen=True, kw_only=True)
class WorkloadProvenance(Provenance):
    lengths: LengthStats
    num_clipped: int = 0
    num_repeated: int = 0
    """How many requests repeat a row, because the source has fewer rows than there are requests."""
    length_scale: float = 1.0
    seed: int


@dataclass(frozen=True, kw_only=True)
class Workload:
    name: str
    requests: tuple[Request, ...]
    provenance: WorkloadProvenance


def build_workload(
    config: WorkloadConfig, generation: GenerationConfig, *, encode: Encode | None = None, data_dir: Path | None = None
) -> Workload:
    """Make the requests of ``config``. Each request gets a seed of its own in place of ``generation.seed``.

    Without ``encode`` (simulation) requests hold only lengths, and a text counts characters / 4
    tokens, rounded up. With it they hold token ids, exactly as many as the length says.
    """
    low, high, fixed = config.min_prompt_len, config.max_prompt_len, config.fixed_prompt_len
    require(1 <= low <= high, f"min_prompt_len={low}, max_prompt_len={high}: need 1 <= min <= max")
    require(
        fixed is None or low <= fixed <= high,
        f"input_len={fixed} must be between {low} and {high}, what an answer leaves for a prompt here: change it or gen_length",
    )
    require(
        fixed is None or config.length_scale == 1.0,
        f"length_scale={config.length_scale} has no effect with input_len={fixed}: drop one of them",
    )
    card = load_card(config.dataset)
    path, unit, arrivals = config.dataset_path, config.time_unit, config.arrivals
    source = open_source(card, config.source, dataset_path=path, data_dir=data_dir, time_unit=unit)
    if not config.may_replace_arrivals:
        _refuse_replaced_arrivals(arrivals, source)
    num = config.num_requests
    rows, times = _rows(arrivals, source, num, config.seed)
    own_ids = [encode(row.prompt) if encode and row.prompt else None for row in rows]
    drawn = _drawn_lengths(config, card, rows, own_ids)
    scaled = drawn if config.length_scale == 1.0 else np.rint(drawn * config.length_scale).astype(np.int64)
    lengths = np.clip(scaled, low, high)
    answers = [row.rounds[0].decode_tokens for row in rows]
    generations = [generation if answer is None else generation_of_length(generation, answer) for answer in answers]
    prompts = _prompts(encode, card.embedded.text, config.seed, lengths.tolist(), own_ids)
    requests = _requests(prompts, lengths.tolist(), times, generations, config.seed)
    counted = {
        "num_clipped": int((lengths != scaled).sum()),
        "num_repeated": max(0, num - len(source.sessions)) if source.sessions else 0,
    }
    num_cut = sum(ids is not None and len(ids) > length for ids, length in zip(own_ids, lengths, strict=True))
    description = _describe(config, card, source, **counted, num_cut=num_cut, tokenized=encode is not None)
    facts = {**counted, "length_scale": config.length_scale, "seed": config.seed}
    return workload_of(card.name, requests, source.origin, description, **facts)


def open_source(
    card: DatasetCard,
    kind: SourceKind,
    *,
    dataset_path: str | None = None,
    data_dir: Path | None = None,
    time_unit: TimeUnit | None = None,
) -> Trace:
    """Read the requests of a data set, each as a session of one round with a prompt. The embedded generator has none, as it never ends.

    We drop and count rows without a prompt (failed calls, in BurstGPT). ``time_unit`` is for a table whose columns do not give the unit.
    An answer has the tokens that its request asks for, if it does.
    """
    file, remarks = chosen_file(card, kind, dataset_path, data_dir), list[str]()
    if file is None and kind != "hub":
        return Trace(name=card.name, origin=embedded_origin(card), sessions=(), columns={})
    from repro.workloads.dataset_rows import entry_for, hub_prompts, is_own_format, prompts_of
    from repro.workloads.table import names_in

    if file is None:
        origin, rows = hub_origin(card), hub_prompts(card)
    else:
        path = file.paths[0]
        entry = file.entry or entry_for(card, path)
        origin, rows = file.origin, prompts_of(card, path, entry, time_unit)
        if entry.format == "trace" and dataset_path is not None and not is_own_format(path):
            remarks.append("outputs as long as asked for, not as the trace's")
        if entry.format == "trace" and "hash_ids" in names_in(path):
            remarks.append(PREFIXES_UNUSED)
    usable = tuple(row for row in rows if row.rounds[0].prefill_tokens)
    require(
        bool(usable),
        f"{origin.location} has no usable row ({len(rows)} read, none with a prompt): check that it is the whole file",
    )
    is_timed = any(row.arrival_s is not None for row in usable)
    return Trace(
        name=card.name,
        origin=origin,
        sessions=usable,
        columns={},
        num_dropped=len(rows) - len(usable),
        time="arrival_s" if is_timed else None,
        remarks=tuple(remarks),
    )


def fixed_workload(
    name: str,
    prompts: Sequence[tuple[int, ...]],
    generation: GenerationConfig,
    *,
    arrivals: ArrivalConfig,
    seed: int,
    origin: Origin,
    description: str,
) -> Workload:
    """Make requests with exactly these prompts in this order. We draw, scale and cut nothing."""
    if arrivals.kind == "trace":
        raise UserError(
            f"arrivals='trace' with dataset={name!r}, which has no timestamps: use poisson, gamma, constant or burst"
        )
    times = arrival_times(arrivals, len(prompts), seed).tolist()
    requests = _requests(prompts, list(map(len, prompts)), times, [generation] * len(prompts), seed)
    return workload_of(name, requests, origin, description, seed=seed)


def traced_workload(
    file: Traced,
    arrivals: ArrivalConfig,
    seed: int,
    generation_of: Callable[[int], GenerationConfig],
    *,
    most: int,
    num: int | None = None,
    length_scale: float = 1.0,
    fixed_prompt_len: int | None = None,
    encode: Encode | None = None,
) -> Workload:
    """Make a request of each row of a file. ``generation_of`` makes its generation from the row's answer length. We cut prompts that leave
    no room for the answer in ``most`` tokens. A row without text gets a generated one, which depends only on seed and index."""
    chosen = take_from(file, arrivals, seed, num=num)
    answers = [_answer_of(session) for session in chosen.sessions]
    generations = list(map(generation_of, answers))
    own_ids = [encode(session.prompt) if encode and session.prompt else None for session in chosen.sessions]
    lengths, num_cut = [], 0
    for session, ids, generation in zip(chosen.sessions, own_ids, generations, strict=True):
        room = most - generation.gen_length
        require(
            room >= 1,
            f"{session.where}: an answer of {generation.gen_length} tokens leaves none for a prompt of the {most} that a request may "
            f"have: take the row out, or use a larger platform",
        )
        prompt_len = session.rounds[0].prefill_tokens if ids is None else len(ids)
        tokens = fixed_prompt_len or max(1, round(length_scale * prompt_len))
        lengths.append(min(tokens, room))
        num_cut += tokens > room
    prompts = _prompts(encode, "chat", seed, lengths, own_ids)
    requests = _requests(prompts, lengths, chosen.arrival_s, generations, seed)
    added = [generation.gen_length - answer for generation, answer in zip(generations, answers, strict=True)]
    num_longer, mean = sum(tokens > 0 for tokens in added), sum(added) / len(added)
    remarks = {
        f"lengths x {length_scale:g}": length_scale != 1.0,
        f"every prompt set to {fixed_prompt_len} tokens": fixed_prompt_len is not None,
        f"{num_cut} of {len(requests)} prompts cut to the room in {most} tokens beside their answers": num_cut,
        f"{num_longer} of {len(requests)} answers rounded up to whole blocks, by {mean:.3g} tokens on the mean": num_longer,
    }
    facts = {
        "num_clipped": num_cut,
        "num_repeated": max(0, len(requests) - len(chosen.trace.sessions)),
        "length_scale": length_scale,
        "seed": seed,
    }
    description = "; ".join([chosen.description, *(text for text, holds in remarks.items() if holds)])
    return workload_of(chosen.trace.name, requests, chosen.trace.origin, description, **facts)


def _answer_of(session: TracedSession) -> int:
    """Return the tokens of the session's one answer. Raises UserError if it has several rounds or no answer."""
    require(
        len(session.rounds) == 1,
        f"{session.where}: a session of {len(session.rounds)} rounds, and requests have one: use a system that serves sessions, or name "
        "the file's columns without those of sessions (--columns)",
    )
    answer = session.rounds[0].decode_tokens
    if answer is None:
        raise UserError(
            f"{session.where}: a prompt without an answer, whose tokens are asked for: give --gen-length, or take the row out"
        )
    return answer


def _requests(
    prompts: Sequence[tuple[int, ...] | None],
    lengths: Sequence[int],
    arrival_s: Sequence[float],
    generations: Sequence[GenerationConfig],
    seed: int,
) -> list[Request]:
    return [
        Request(
            request_id=index,
            prompt_len=length,
            prompt_ids=ids,
            arrival_s=time_s,
            generation=replace(generation, seed=derive_seed(seed, "generation", index)),
        )
        for index, (ids, length, time_s, generation) in enumerate(
            zip(prompts, lengths, arrival_s, generations, strict=True)
        )
    ]


def workload_of(name: str, requests: Sequence[Request], origin: Origin, description: str, **facts: float) -> Workload:
    """The workload of these requests, with its checksum and lengths. ``facts`` are the other fields of WorkloadProvenance."""
    lines = (
        f"{request.request_id}|{request.arrival_s:.6f}|{request.prompt_len}|{request.generation.gen_length}|{request.generation.seed}|"
        f"{'-' if request.prompt_ids is None else ','.join(map(str, request.prompt_ids))}"
        for request in requests
    )
    lengths, n = np.sort(np.array([request.prompt_len for request in requests], dtype=np.int64)), len(requests)
    p50, p90, longest = (int(lengths[index]) for index in (int(0.5 * n), int(0.9 * n), -1))
    provenance = WorkloadProvenance(
        **vars(origin),
        description=description,
        checksum=checksum(lines),
        lengths=LengthStats(n=n, mean=float(lengths.mean()), p50=p50, p90=p90, max=longest),
        **facts,  # type: ignore[arg-type]
    )
    return Workload(name=name, requests=tuple(requests), provenance=provenance)


def _refuse_replaced_arrivals(arrivals: ArrivalConfig, source: Trace) -> None:
    num_stamped = sum(row.arrival_s is not None for row in source.sessions)
    if num_stamped and arrivals.kind != "trace":
        how = "at once" if arrivals.kind == "burst" else f"{arrivals.kind} at {arrivals.rate:g} requests/s"
        raise UserError(
            f"{source.origin.location} has arrival times in {num_stamped} rows, and requests would arrive {how} "
            f"instead: keep them with --arrivals trace, or say --arrivals {arrivals.kind}"
        )


def _rows(
    arrivals: ArrivalConfig, source: Trace, num: int, seed: int
) -> tuple[Sequence[TracedSession], Sequence[float]]:
    """Return the rows to ask for, and their arrival times. Rows of the embedded generator are empty.

    Rows come in the order of their own timestamps if those are replayed, else in seeded random
    order without replacement. If there are too few, they come again, in another order.
    """
    if not source.sessions:
        require(
            arrivals.kind != "trace",
            "arrivals='trace' with embedded prompts, which have no timestamps: give a dataset_path with timestamps",
        )
        return [TracedSession((RecordedRound(0, None),))] * num, arrival_times(arrivals, num, seed).tolist()
    if arrivals.kind == "trace":
        source = replace(source, sessions=tuple(sorted(source.sessions, key=lambda row: row.arrival_s or 0)))
    chosen = take(source, arrivals, seed, num=num, comes_once=False)
    return chosen.sessions, chosen.arrival_s


def _drawn_lengths(
    config: WorkloadConfig, card: DatasetCard, rows: Sequence[TracedSession], own_ids: Sequence[list[int] | None]
) -> Ints:
    """Draw or count the lengths before we scale and clip them."""
    if config.fixed_prompt_len is not None:
        return np.full(len(rows), config.fixed_prompt_len, dtype=np.int64)
    if not rows[0].rounds[0].prefill_tokens:
        rng = np.random.default_rng(derive_seed(config.seed, "lengths"))
        return card.embedded.lengths.draw(len(rows), rng)
    drawn = [row.rounds[0].prefill_tokens if ids is None else len(ids) for row, ids in zip(rows, own_ids, strict=True)]
    return np.array(drawn, dtype=np.int64)


def _prompts(
    encode: Encode | None, style: TextStyle, seed: int, lengths: Sequence[int], own_ids: Sequence[list[int] | None]
) -> list[tuple[int, ...] | None]:
    """Make the ids of each prompt, with a random stream of its own. All are None without a tokenizer."""
    if encode is None:
        return [None] * len(lengths)
    return [
        prompt_ids(encode, style, random.Random(derive_seed(seed, "text", index)), length, ids)
        for index, (length, ids) in enumerate(zip(lengths, own_ids, strict=True))
    ]


def whole_answer(tokens: int) -> GenerationConfig:
    """Make the generation of an answer that is not divided into blocks."""
    return GenerationConfig(gen_length=tokens, block_length=tokens, steps=tokens)


def generation_of_length(base: GenerationConfig, gen_length: int) -> GenerationConfig:
    """Make the generation for another length. Whole blocks keep their number of steps, and a partial last block gets a part of it."""
    if gen_length == base.gen_length:
        return base
    num_blocks = -(-gen_length // base.block_length)
    # We round up, so that whole blocks keep their steps (``steps_per_block``).
    steps = max(num_blocks, -(-base.steps * gen_length // base.gen_length))
    return replace(base, gen_length=gen_length, steps=steps)


def _describe(
    config: WorkloadConfig,
    card: DatasetCard,
    source: Trace,
    *,
    num_clipped: int,
    num_repeated: int,
    num_cut: int,
    tokenized: bool,
) -> str:
    embedded, rows, num = card.embedded, source.sessions, config.num_requests
    basis = "an ASSUMPTION" if embedded.basis == "assumed" else "fitted"
    kind = "hub data set" if source.origin.source == "hub" else "local file"
    has_texts, is_embedded = any(row.prompt is not None for row in rows), not rows
    lacks_texts = is_embedded or any(row.prompt is None for row in rows)
    remarks = {
        f"{card.title}: embedded generator, lengths {basis} ({embedded.summary})": is_embedded,
        f"{card.title}: {kind} {source.origin.location}, {len(rows)} rows": not is_embedded,
        f"{source.num_dropped} rows with an empty prompt left out": source.num_dropped,
        f"{num_repeated} of {num} requests repeat a row": num_repeated,
        "token counts estimated as characters / 4": has_texts and not tokenized,
        "prompt text from templates": tokenized and lacks_texts,
        f"every prompt set to {config.fixed_prompt_len} tokens": config.fixed_prompt_len is not None,
        f"lengths x {config.length_scale:g}": config.length_scale != 1.0,
        f"{num_cut} of {num} prompts cut to these lengths": num_cut,
        **dict.fromkeys(source.remarks, True),
        f"{num_clipped} of {num} lengths clipped to [{config.min_prompt_len}, {config.max_prompt_len}]": num_clipped,
    }
    return "; ".join(text for text, holds in remarks.items() if holds)
