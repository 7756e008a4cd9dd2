"""A workload: requests with arrival times, prompt lengths and seeds, and where they came from.

Streams are independent: lengths do not depend on the arrivals, and the first n requests of a longer
workload are the same requests.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from engines.bounds import check_fields
from engines.dllm.config import GenerationConfig
from engines.dllm.request import Request
from engines.errors import UserError
from repro.workloads.arrivals import ArrivalConfig, arrival_times
from repro.workloads.card import DatasetCard, load_card
from repro.workloads.row import PromptRow
from repro.workloads.seed import derive_seed
from repro.workloads.source import HubLoader, PromptSource, SourceKind, UsedSource, check_source, open_source
from repro.workloads.text import TextStyle, more_text, prompt_text
from repro.workloads.trace import estimate_tokens, parse_trace

Encode = Callable[[str], list[int]]
"""Text to token ids, without adding special tokens: a text may be encoded in pieces."""


@dataclass(frozen=True, kw_only=True)
class WorkloadConfig:
    """``length_scale`` multiplies every prompt length before clipping to
    [``min_prompt_len``, ``max_prompt_len``]; ``fixed_prompt_len`` replaces the lengths altogether."""

    dataset: str
    num_requests: int
    seed: int
    arrivals: ArrivalConfig
    max_prompt_len: int
    min_prompt_len: int = 8
    source: SourceKind = "auto"
    dataset_path: str | None = None
    length_scale: float = 1.0
    fixed_prompt_len: int | None = None
    may_replace_arrivals: bool = True
    """Whether a file's own arrival times may give way to ``arrivals``; else such a file is refused."""

    def __post_init__(self) -> None:
        check_fields(self)
        object.__setattr__(self, "dataset", self.dataset.lower())  # LiveBench and livebench are the same cell
        check_source(self.source, self.dataset_path)
        if self.num_requests < 1:
            raise UserError(f"num_requests={self.num_requests} must be at least 1")
        if self.seed < 0:
            raise UserError(f"seed={self.seed} must not be negative")
        if not 1 <= self.min_prompt_len <= self.max_prompt_len:
            raise UserError(
                f"min_prompt_len={self.min_prompt_len}, max_prompt_len={self.max_prompt_len}: need 1 <= min <= max"
            )
        if not 0 < self.length_scale < float("inf"):
            raise UserError(f"length_scale={self.length_scale} must be a finite number above 0")
        if self.fixed_prompt_len is not None:
            if not self.min_prompt_len <= self.fixed_prompt_len <= self.max_prompt_len:
                raise UserError(
                    f"fixed_prompt_len={self.fixed_prompt_len} must be between"
                    f" min_prompt_len={self.min_prompt_len} and max_prompt_len={self.max_prompt_len}"
                )
            if self.length_scale != 1.0:
                raise UserError(
                    f"length_scale={self.length_scale} has no effect with"
                    f" fixed_prompt_len={self.fixed_prompt_len}: drop one of them"
                )


@dataclass(frozen=True, kw_only=True)
class LengthStats:
    """Prompt lengths in tokens; percentile p is sorted[int(p * n)]."""

    n: int
    mean: float
    p50: int
    p90: int
    max: int


@dataclass(frozen=True, kw_only=True)
class WorkloadProvenance:
    source: UsedSource
    description: str
    location: str
    """File name, hub id or card."""
    revision: str | None
    checksum: str
    """sha256 over the ids, arrivals, lengths, seeds and token ids of the requests."""
    lengths: LengthStats
    num_clipped: int
    num_repeated: int
    """Requests beyond the rows of the source, which then come round again."""
    length_scale: float
    seed: int


@dataclass(frozen=True, kw_only=True)
class Workload:
    name: str
    requests: tuple[Request, ...]
    provenance: WorkloadProvenance


def build_workload(
    config: WorkloadConfig,
    generation: GenerationConfig,
    *,
    encode: Encode | None = None,
    data_dir: Path | None = None,
    hub_loader: HubLoader | None = None,
) -> Workload:
    """The requests of ``config``. ``generation.seed`` is replaced by one seed per request.

    Without ``encode`` (simulation) requests carry lengths only, and a text counts characters / 4
    tokens, rounded up. With it they carry token ids, exactly as many as the length says.
    """
    card = load_card(config.dataset)
    source = open_source(
        card, config.source, dataset_path=config.dataset_path, data_dir=data_dir, hub_loader=hub_loader
    )
    if not config.may_replace_arrivals:
        _refuse_replaced_arrivals(config.arrivals, source)
    source, trace_s = _with_trace_times(config.arrivals, source)
    rows = _pick_rows(config, source)
    texts: list[list[int] | None] = [encode(row.prompt) if encode and row.prompt else None for row in rows]
    lengths, num_clipped = _final_lengths(config, _drawn_lengths(config, card, rows, texts))
    arrivals = arrival_times(config.arrivals, config.num_requests, config.seed, trace_s=trace_s)

    requests = []
    for index, prompt_len in enumerate(lengths.tolist()):
        row = rows[index] if rows else PromptRow()
        ids = None
        if encode is not None:
            rng = random.Random(derive_seed(config.seed, "text", index))
            ids = _prompt_ids(encode, card.embedded.text, rng, prompt_len, texts[index] if rows else None)
        requests.append(
            Request(
                request_id=index,
                prompt_len=prompt_len,
                prompt_ids=ids,
                arrival_s=float(arrivals[index]),
                generation=_generation(generation, row.gen_length, derive_seed(config.seed, "generation", index)),
            )
        )
    num_cut = sum(own is not None and len(own) > kept for own, kept in zip(texts, lengths, strict=bool(rows)))
    num_repeated = max(0, config.num_requests - len(source.rows)) if source.rows is not None else 0
    return Workload(
        name=card.name,
        requests=tuple(requests),
        provenance=WorkloadProvenance(
            source=source.used,
            description=_describe(
                config, card, source, num_clipped, num_repeated, num_cut, tokenized=encode is not None
            ),
            location=source.location,
            revision=source.revision,
            checksum=_checksum(requests),
            lengths=_length_stats(lengths),
            num_clipped=num_clipped,
            num_repeated=num_repeated,
            length_scale=config.length_scale,
            seed=config.seed,
        ),
    )


def fixed_workload(
    name: str,
    prompts: Sequence[tuple[int, ...]],
    generation: GenerationConfig,
    *,
    arrivals: ArrivalConfig,
    seed: int,
    source: UsedSource,
    location: str,
    revision: str | None,
    description: str,
) -> Workload:
    """Requests with exactly these prompts, in this order: nothing is drawn, scaled or cut."""
    if arrivals.kind == "trace":
        raise UserError(
            f"arrivals='trace' with dataset={name!r}, which has no timestamps: use poisson, gamma, constant or burst"
        )
    times = arrival_times(arrivals, len(prompts), seed)
    requests = tuple(
        Request(
            request_id=index,
            prompt_len=len(ids),
            prompt_ids=ids,
            arrival_s=float(times[index]),
            generation=replace(generation, seed=derive_seed(seed, "generation", index)),
        )
        for index, ids in enumerate(prompts)
    )
    return Workload(
        name=name,
        requests=requests,
        provenance=WorkloadProvenance(
            source=source,
            description=description,
            location=location,
            revision=revision,
            checksum=_checksum(requests),
            lengths=_length_stats(np.array([len(ids) for ids in prompts], dtype=np.int64)),
            num_clipped=0,
            num_repeated=0,
            length_scale=1.0,
            seed=seed,
        ),
    )


def _refuse_replaced_arrivals(arrivals: ArrivalConfig, source: PromptSource) -> None:
    num_stamped = sum(row.arrival_s is not None for row in source.rows or ())
    if num_stamped and arrivals.kind != "trace":
        how = "at once" if arrivals.kind == "burst" else f"{arrivals.kind} at {arrivals.rate:g} requests/s"
        raise UserError(
            f"{source.location} has arrival times in {num_stamped} rows, and requests would arrive {how} instead: keep them "
            f"with --arrivals trace, or say --arrivals {arrivals.kind}"
        )


def _with_trace_times(arrivals: ArrivalConfig, source: PromptSource) -> tuple[PromptSource, NDArray[np.float64] | None]:
    """The timestamps to replay, if any; a source replayed with its own ones comes back in their order."""
    if arrivals.kind != "trace":
        return source, None
    if arrivals.path is not None:
        rows, name = parse_trace(Path(arrivals.path)), Path(arrivals.path).name
    elif source.rows is not None:
        rows, name = source.rows, source.location
    else:
        raise UserError(
            "arrivals='trace' with embedded prompts, which have no timestamps: give the arrivals a path, or "
            "a dataset_path with timestamps"
        )
    stamped = sorted(((row.arrival_s, index) for index, row in enumerate(rows) if row.arrival_s is not None))
    if len(stamped) < len(rows):
        raise UserError(
            f"arrivals='trace': {name} has a timestamp for {len(stamped)} of {len(rows)} rows only: "
            f"use another file, or arrivals='poisson'"
        )
    if arrivals.path is None:
        source = replace(source, rows=tuple(rows[index] for _, index in stamped))
    return source, np.array([stamp for stamp, _ in stamped], dtype=np.float64)


def _pick_rows(config: WorkloadConfig, source: PromptSource) -> list[PromptRow]:
    """One row per request; empty for the embedded generator.

    Rows come in the order of their own timestamps when those are replayed, else in seeded random
    order without replacement; then all over again (in another order) if there are too few.
    """
    if source.rows is None:
        return []
    num_rows = len(source.rows)
    order: list[int] = []
    for lap in range(-(-config.num_requests // num_rows)):
        if config.arrivals.kind == "trace" and config.arrivals.path is None:
            order.extend(range(num_rows))
        else:
            rng = np.random.default_rng(derive_seed(config.seed, "rows", lap))
            order.extend(rng.permutation(num_rows).tolist())
    return [source.rows[index] for index in order[: config.num_requests]]


def _drawn_lengths(
    config: WorkloadConfig, card: DatasetCard, rows: Sequence[PromptRow], texts: Sequence[list[int] | None]
) -> NDArray[np.int64]:
    if not rows:
        rng = np.random.default_rng(derive_seed(config.seed, "lengths"))
        return card.embedded.lengths.draw(config.num_requests, rng)
    drawn = []
    for row, ids in zip(rows, texts, strict=True):
        if row.prompt is None:
            assert row.prompt_len is not None
            drawn.append(row.prompt_len)
        else:
            drawn.append(len(ids) if ids is not None else estimate_tokens(len(row.prompt)))
    return np.array(drawn, dtype=np.int64)


def _final_lengths(config: WorkloadConfig, drawn: NDArray[np.int64]) -> tuple[NDArray[np.int64], int]:
    if config.fixed_prompt_len is not None:
        return np.full(len(drawn), config.fixed_prompt_len, dtype=np.int64), 0
    scaled = np.rint(drawn * config.length_scale).astype(np.int64)
    clipped = np.clip(scaled, config.min_prompt_len, config.max_prompt_len)
    return clipped, int((clipped != scaled).sum())


def _prompt_ids(
    encode: Encode, style: TextStyle, rng: random.Random, prompt_len: int, own_ids: list[int] | None
) -> tuple[int, ...]:
    """Exactly ``prompt_len`` ids: of the row's own text, cut at its end or continued by the generator,
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


def _generation(base: GenerationConfig, gen_length: int | None, seed: int) -> GenerationConfig:
    """The request's own generation; another length keeps the steps of whole blocks, and has a part of them for a rest."""
    if gen_length is None or gen_length == base.gen_length:
        return replace(base, seed=seed)
    num_blocks = -(-gen_length // base.block_length)
    # Rounded up, the steps of every whole block stay what they are (``steps_per_block``).
    steps = max(num_blocks, -(-base.steps * gen_length // base.gen_length))
    return replace(base, gen_length=gen_length, steps=steps, seed=seed)


def _describe(
    config: WorkloadConfig,
    card: DatasetCard,
    source: PromptSource,
    num_clipped: int,
    num_repeated: int,
    num_cut: int,
    *,
    tokenized: bool,
) -> str:
    embedded = card.embedded
    if source.rows is None:
        basis = "an ASSUMPTION" if embedded.basis == "assumed" else "fitted"
        parts = [f"{card.title}: embedded generator, lengths {basis} ({embedded.summary})"]
    else:
        kind = "hub data set" if source.used == "hub" else "local file"
        parts = [f"{card.title}: {kind} {source.location}, {len(source.rows)} rows"]
        if source.num_dropped:
            parts.append(f"{source.num_dropped} rows with an empty prompt left out")
        if num_repeated:
            parts.append(f"{num_repeated} of {config.num_requests} requests repeat a row")
        if any(row.prompt is not None for row in source.rows) and not tokenized:
            parts.append("token counts estimated as characters / 4")
    if tokenized and (source.rows is None or any(row.prompt is None for row in source.rows)):
        parts.append("prompt text from templates")
    if config.fixed_prompt_len is not None:
        parts.append(f"every prompt set to {config.fixed_prompt_len} tokens")
    if config.length_scale != 1.0:
        parts.append(f"lengths x {config.length_scale:g}")
    if num_cut:
        parts.append(f"{num_cut} of {config.num_requests} prompts cut to these lengths")
    if config.dataset_path is not None and any(row.response_len is not None for row in source.rows or ()):
        parts.append("outputs as long as asked for, not as the trace's")
    if num_clipped:
        parts.append(
            f"{num_clipped} of {config.num_requests} lengths clipped to"
            f" [{config.min_prompt_len}, {config.max_prompt_len}]"
        )
    return "; ".join(parts)


def _length_stats(lengths: NDArray[np.int64]) -> LengthStats:
    ordered = np.sort(lengths)
    n = len(ordered)
    return LengthStats(
        n=n,
        mean=float(ordered.mean()),
        p50=int(ordered[int(0.5 * n)]),
        p90=int(ordered[int(0.9 * n)]),
        max=int(ordered[-1]),
    )


def _checksum(requests: Sequence[Request]) -> str:
    digest = hashlib.sha256()
    for request in requests:
        ids = "-" if request.prompt_ids is None else ",".join(map(str, request.prompt_ids))
        generation = request.generation
        digest.update(
            f"{request.request_id}|{request.arrival_s:.6f}|{request.prompt_len}|{generation.gen_length}|"
            f"{generation.seed}|{ids}\n".encode()
        )
    return digest.hexdigest()
