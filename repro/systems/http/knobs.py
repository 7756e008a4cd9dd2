"""The knobs of a cell on an endpoint, resolved."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from engines.bounds import MOST, check_fields
from engines.errors import UserError, require
from engines.strict_json import RepeatedKeyError, unique
from repro.runs.cell import Cell
from repro.systems.http.endpoint import EXTRA_HEADERS, Endpoint

GOODPUT_TIMES = ("ttft", "tpot", "e2el")
LONGEST_PROMPT = 4096
"""Where nothing else is asked for."""
MOST_WARMUPS = 1000
MOST_LIMIT_MS = 1e9
"""Of a good request; twelve days."""
NOTES = ("basis",)
"""Knobs that are no settings."""
_ONE = "each request is answered once, as a stream, whose pieces are timed: leave it out"
_NOT_EXTRA: Mapping[str, str] = {
    "model": "use --model",
    "prompt messages prompt_embeds input input_ids input_tokens inputs": "prompts are those of --dataset-name",
    "max_tokens max_completion_tokens max_new_tokens max_output_tokens min_tokens min_new_tokens": "use --gen-length",
    "temperature": "use --temperature",
    "seed": "use --seed",
    "ignore_eos": "use --knob ignore_eos=false, or leave it out",
    "stream stream_options n best_of use_beam_search num_return_sequences echo": _ONE,
    "truncate_prompt_tokens": "prompts are sent whole: use --knob max_prompt_len, or --input-len",
    f"{EXTRA_HEADERS} extra_query extra_body": "it is no field of a request: leave it out, and give the fields themselves",
}
"""What the benchmark itself decides of a request, or is read off it, and what to use instead."""


@dataclass(frozen=True, kw_only=True)
class HttpKnobs:
    """Lengths are tokens, and of sessions scale every round. None takes the data set's own."""

    url: str
    model: str | None = None
    """As the endpoint calls it; None where it serves one alone."""
    api: str = "completions"
    """completions sends token ids, which makes lengths exact; chat sends text."""
    tokenizer: str = "tiny"
    """Checkpoint whose tokenizer makes the prompts; ids of the embedded one are valid in any larger vocabulary."""
    num_prompts: int = 100
    input_len: int | None = None
    gen_length: int = 64
    length_scale: float | None = None
    """None: as in this process, by the server's context; sessions keep their own lengths."""
    max_prompt_len: int | None = None
    """None: what the server's context leaves, or ``LONGEST_PROMPT``."""
    arrivals: str | None = None
    burstiness: float = 1.0
    dataset_source: str = "auto"
    dataset_path: str | None = None
    delay_mean_s: float | None = None
    temperature: float = 0.0
    ignore_eos: bool = True
    max_concurrency: int | None = None
    num_warmups: int = 1
    unique_prefix: bool = True
    goodput: str | None = None
    timeout_s: float = 600.0
    extra: str | None = None
    """A JSON object of further fields for every request."""

    def __post_init__(self) -> None:
        check_fields(self)
        for name in ("num_prompts", "gen_length", "max_prompt_len"):
            value = getattr(self, name)
            require(value is None or value >= 1, f"{name}={value} must be at least 1")
        require(self.length_scale is None or self.length_scale > 0, f"length_scale={self.length_scale} must be above 0")
        for name, most in (("num_warmups", MOST_WARMUPS), ("max_prompt_len", MOST["max_model_len"])):
            value = getattr(self, name)
            require(
                value is None or value <= most,
                f"{name}={value} is more than {most:.16g}, the most that is taken: give a smaller number",
            )
        require(self.num_warmups >= 0, f"num_warmups={self.num_warmups} must not be negative")
        require(self.temperature >= 0, f"temperature={self.temperature:g} must not be negative: 0 is greedy")
        require(
            self.max_concurrency is None or self.max_concurrency >= 1,
            f"max_concurrency={self.max_concurrency} must be at least 1",
        )
        require(
            self.input_len is None or 1 <= self.input_len <= self.longest_prompt,
            f"input_len={self.input_len} must be between 1 and max_prompt_len={self.longest_prompt}",
        )
        require(
            self.input_len is None or self.length_scale in (None, 1),
            f"length_scale={self.length_scale} has no effect with input_len={self.input_len}: leave one out",
        )
        _ = self.endpoint, self.limits, self.extra_fields

    @property
    def longest_prompt(self) -> int:
        """Of a server of any context."""
        return LONGEST_PROMPT if self.max_prompt_len is None else self.max_prompt_len

    @property
    def endpoint(self) -> Endpoint:
        return Endpoint(url=self.url, api=self.api, timeout_s=self.timeout_s)  # type: ignore[arg-type]

    @property
    def limits(self) -> Mapping[str, float]:
        """Seconds by name of the time; empty without ``goodput``."""
        found: dict[str, float] = {}
        for word in (self.goodput or "").split():
            match = re.fullmatch(r"([a-z0-9]+):(\d+(?:\.\d+)?)", word)
            if match is None or match[1] not in GOODPUT_TIMES or match[1] in found:
                raise UserError(
                    f"goodput={self.goodput!r} is no list of limits: write each of {', '.join(GOODPUT_TIMES)} once, in ms, "
                    f"like 'ttft:200 tpot:50'"
                )
            limit_ms = float(match[2])
            require(
                0 < limit_ms <= MOST_LIMIT_MS,
                f"goodput={self.goodput!r} is no list of limits: each is above 0 ms and at most {MOST_LIMIT_MS:g}",
            )
            found[match[1]] = limit_ms / 1e3
        return found

    @property
    def extra_fields(self) -> Mapping[str, Any]:
        if self.extra is None:
            return {}
        try:
            found = json.loads(self.extra, object_pairs_hook=unique)
            json.dumps(found, allow_nan=False)
        except RepeatedKeyError as error:
            raise UserError(f"extra={self.extra!r}: {error}: keep one") from None
        except (ValueError, RecursionError):
            found = None
        if not isinstance(found, dict):
            raise UserError(f"extra={self.extra!r} is no JSON object: write it like '{{\"steps\": 8}}'")
        for name in (*found, *(found["nvext"] if isinstance(found.get("nvext"), dict) else ())):
            fix = next((fix for names, fix in _NOT_EXTRA.items() if name.lower() in names.split()), None)
            require(fix is None, f"extra: {name} is not for it to set: {fix}")
        return found


def knobs_of(cell: Cell) -> HttpKnobs:
    known = [field.name for field in fields(HttpKnobs)]
    given = {name: value for name, value in cell.knob_values.items() if name not in NOTES and value is not None}
    for name, value in given.items():
        require(
            name in known,
            f"{name}={value!r} has no effect with system={cell.system!r}: leave it out, or use one of {', '.join(known)}",
        )
    require("url" in given, "url is missing: give the endpoint's, like --url http://127.0.0.1:8000")
    return HttpKnobs(**given)  # type: ignore[arg-type]
