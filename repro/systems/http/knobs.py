"""The knobs of a cell on an endpoint, resolved."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from engines.dllm.config import AnswerTokens, Level
from engines.errors import UserError, require
from engines.knobs import Checked, Range, Tokens
from engines.strict_json import json_object
from repro.systems.http.endpoint import EXTRA_HEADERS, Endpoint
from repro.systems.resolve import resolve as resolve_knobs
from repro.workloads.knobs import RequestKnobs

GOODPUT_TIMES = ("ttft", "tpot", "e2el")
LONGEST_PROMPT = 4096
"""Where nothing else is asked for."""
MOST_LIMIT_MS = 1e9
"""The longest limit of a good request; twelve days."""
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
class HttpKnobs(RequestKnobs, Checked):
    """Lengths are tokens, and of sessions scale every round."""

    endpoint: Endpoint
    model: str | None = None
    """As the endpoint calls it; may be left out where it serves one alone."""
    tokenizer: str | None = None
    """Checkpoint whose tokenizer makes the prompts, and counts answers whose tokens the endpoint does not tell; by default the embedded one
    makes prompts, whose ids are valid in any larger vocabulary, and counts nothing."""
    num_prompts: Annotated[int, Range(1, 10**5)] = 100
    """Requests, or sessions."""
    gen_length: AnswerTokens = 64
    """Tokens to generate."""
    length_scale: Annotated[float, Range(above=0, most=1e3)] | None = None
    """Factor of the data set's lengths; by default as in this process, by the server's context, and 1 of sessions."""
    max_prompt_len: Tokens | None = None
    """Longest prompt; by default what the server's context leaves, or 4096."""
    delay_mean_s: float | None = None
    """Mean seconds between an answer and the next round."""
    temperature: Level = 0.0
    """0 is greedy."""
    ignore_eos: bool = True
    """Ask for exactly as many tokens; without, answers may end early."""
    max_concurrency: Annotated[int, Range(least=1)] | None = None
    """Requests under way at once."""
    num_warmups: Annotated[int, Range(0, 1000)] = 1
    """Requests before the run, not measured."""
    unique_prefix: bool = True
    """Begin each conversation with 16 ids drawn anew in every run, which no cache has seen."""
    goodput: str | None = None
    """Limits in ms of a good request, like 'ttft:200 tpot:50 e2el:5000'."""
    extra: str | None = None
    """A JSON object of further fields for every request."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            self.input_len is None or self.input_len <= self.longest_prompt,
            f"input_len={self.input_len} must be between 1 and max_prompt_len={self.longest_prompt}",
        )
        require(
            self.input_len is None or self.length_scale in (None, 1),
            f"length_scale={self.length_scale} has no effect with input_len={self.input_len}: leave one out",
        )
        _ = self.limits, self.extra_fields

    @property
    def longest_prompt(self) -> int:
        """The longest prompt that a server of any context is sent."""
        return LONGEST_PROMPT if self.max_prompt_len is None else self.max_prompt_len

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
        found = json_object("extra", self.extra, example='{"steps": 8}')
        for name in (*found, *(found["nvext"] if isinstance(found.get("nvext"), dict) else ())):
            fix = next((fix for names, fix in _NOT_EXTRA.items() if name.lower() in names.split()), None)
            require(fix is None, f"extra: {name} is not for it to set: {fix}")
        return found


def resolve(system: str, given: Mapping[str, Any]) -> HttpKnobs:
    require("url" in given, "url is missing: give the endpoint's, like --url http://127.0.0.1:8000")
    return resolve_knobs(HttpKnobs, given, who=system, endpoint=Endpoint(url=given["url"]))
