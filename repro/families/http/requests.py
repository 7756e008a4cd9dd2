"""The knobs of an endpoint's cell, and its requests and sessions as bodies of an OpenAI-compatible API. Each conversation gets a prefix
that no cache has seen."""

import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Annotated, Any

from engines.cluster.sessions import Session
from engines.data import json_object
from engines.dllm.config import AnswerTokens, Level
from engines.errors import UserError, require
from engines.knobs import Checked, Range, Tokens
from engines.knobs import resolve as resolve_knobs
from engines.models.checkpoint import TINY_DIR, checkpoint_dir
from engines.models.tokenizer import TextTokenizer, load_tokenizer
from repro.families.http.endpoint import EXTRA_HEADERS, Endpoint
from repro.files import file_cache
from repro.runs.cell import Cell
from repro.runs.family import SYNONYMS
from repro.runs.http_driver import Ask, Reply
from repro.tasks.registry import TASKS
from repro.workloads.draws import ArrivalConfig, arrivals_of, derive_seed
from repro.workloads.knobs import EMBEDDED_CONTEXT, MIN_PROMPT_LEN, RequestKnobs, length_scale_for
from repro.workloads.rounds import MOST_TOKENS
from repro.workloads.served import Traced, trace_of, trace_source, workload_knobs
from repro.workloads.sessions import SessionWorkloadConfig, build_sessions, known_session_cards
from repro.workloads.workload import Workload, WorkloadConfig, build_workload, more_text, traced_workload, whole_answer

GOODPUT_TIMES = ("ttft", "tpot", "itl", "e2el")
LONGEST_PROMPT = 4096
"""The default for the most tokens of a prompt."""
MOST_LIMIT_MS = 1e9
"""The highest limit on a good request's times: twelve days."""
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
"""Fields of a request that the benchmark decides or measures itself, and what to use instead of each."""


@dataclass(frozen=True, kw_only=True)
class HttpKnobs(RequestKnobs, Checked):
    """The knobs of an endpoint. Lengths are in tokens; for sessions they scale every round."""

    endpoint: Endpoint
    model: str | None = None
    """The model's name at the endpoint. You can leave it out if the endpoint serves only one."""
    tokenizer: str | None = None
    """Checkpoint whose tokenizer makes the prompts, and counts answers if the endpoint does not. By default the embedded tokenizer makes
    the prompts, with ids that are valid in any larger vocabulary, and counts nothing."""
    num_prompts: Annotated[int, Range(1, 10**5)] = 100
    """How many requests, or sessions, to send."""
    gen_length: AnswerTokens = 64
    """Tokens to generate."""
    length_scale: Annotated[float, Range(above=0, most=1e3)] | None = None
    """Factor on the data set's lengths. By default it follows from the server's context, as in runs without a server; 1 for sessions."""
    max_prompt_len: Tokens | None = None
    """The most tokens of a prompt; by default what the server's context leaves, or 4096."""
    delay_mean_s: float | None = None
    """Mean seconds between an answer and the next round."""
    temperature: Level = 0.0
    """0 is greedy."""
    ignore_eos: bool = True
    """Ask for exactly gen_length tokens. Without it, answers may end early."""
    max_concurrency: Annotated[int, Range(least=1)] | None = None
    """The most requests under way at once."""
    num_warmups: Annotated[int, Range(0, 1000)] = 1
    """Requests before the run, which are not measured."""
    unique_prefix: bool = True
    """Begin each conversation with 16 ids that are drawn anew in every run, so that no cache has seen them."""
    goodput: str | None = None
    """Limits in ms of a good request, like 'ttft:200 itl-request:50 e2el:5000'. itl-request (tpot) is its mean gap between tokens,
    itl-gap (itl) the P95 of its own gaps."""
    extra: str | None = None
    """A JSON object with further fields for every request."""

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
        """The most tokens of a prompt, whatever the server's context."""
        return LONGEST_PROMPT if self.max_prompt_len is None else self.max_prompt_len

    @property
    def limits(self) -> Mapping[str, float]:
        """The limits of ``goodput`` in seconds, by name. Empty without it."""
        limits: dict[str, float] = {}
        for word in (self.goodput or "").split():
            match = re.fullmatch(r"([a-z0-9-]+):(\d+(?:\.\d+)?)", word)
            name = "" if match is None else SYNONYMS.get(match[1], match[1])
            if match is None or name not in GOODPUT_TIMES or name in limits:
                raise UserError(
                    f"goodput={self.goodput!r} is no list of limits: write each of {', '.join((*GOODPUT_TIMES, *SYNONYMS))} once, in ms, "
                    f"like 'ttft:200 tpot:50'"
                )
            limit_ms = float(match[2])
            require(
                0 < limit_ms <= MOST_LIMIT_MS,
                f"goodput={self.goodput!r} is no list of limits: each is above 0 ms and at most {MOST_LIMIT_MS:g}",
            )
            limits[name] = limit_ms / 1e3
        return limits

    @property
    def extra_fields(self) -> Mapping[str, Any]:
        if self.extra is None:
            return {}
        fields = json_object("extra", self.extra, example='{"steps": 8}')
        for name in (*fields, *(fields["nvext"] if isinstance(fields.get("nvext"), dict) else ())):
            fix = next((fix for names, fix in _NOT_EXTRA.items() if name.lower() in names.split()), None)
            require(fix is None, f"extra: {name} is not for it to set: {fix}")
        return fields


def resolve(system: str, knobs: Mapping[str, Any]) -> HttpKnobs:
    require("url" in knobs, "url is missing: give the endpoint's, like --url http://127.0.0.1:8000")
    return resolve_knobs(HttpKnobs, knobs, workload_knobs(knobs), system=system, endpoint=Endpoint(url=knobs["url"]))


# -- workloads --------------------------------------------------------------------------------------------

PREFIX_TOKENS = 16
"""Tokens of a conversation's unique prefix. They fill one block of caches that keep whole blocks."""

CHARACTERS_OF_TOKEN = 16
"""More characters than any tokenizer packs into a token on average over a text. Published tokenizers reach 3 to 5."""
TEMPLATE_TOKENS = 1024
"""The most tokens that a chat template may add to a conversation, with its own system prompt. It may add a 16th of this to each message."""

Ids = tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Turn:
    new_ids: Ids
    """The ids that the turn adds to the history."""
    asked_tokens: int


@dataclass(frozen=True, kw_only=True)
class HttpConversation:
    """A ``Conversation`` with an endpoint. Every request's body holds ``fields``."""

    session_id: int
    arrival_s: float
    turns: tuple[Turn, ...]
    delays_s: tuple[float, ...]
    is_chat: bool
    seed: int
    fields: Mapping[str, Any] = field(default_factory=dict)
    decode: Callable[[Sequence[int]], str]
    encode: Callable[[str], list[int]]

    def ask(self, turn: int, replies: Sequence[Reply]) -> Ask:
        max_tokens = self.turns[turn].asked_tokens
        body = {**self.fields, "seed": self.seed, "max_tokens": max_tokens}
        if self.is_chat:
            messages = []
            for past_turn, reply in zip(self.turns, replies, strict=False):
                messages.append({"role": "user", "content": self.decode(past_turn.new_ids)})
                messages.append({"role": "assistant", "content": reply.text})
            messages.append({"role": "user", "content": self.decode(self.turns[turn].new_ids)})
            length = sum(len(entry.new_ids) for entry in self.turns[: turn + 1])
            return Ask(body={**body, "messages": messages}, prompt_len=length, asked_tokens=max_tokens)
        ids: list[int] = []
        for past_turn, reply in zip(self.turns, replies, strict=False):
            ids += past_turn.new_ids
            ids += self._answer_ids(reply)
        ids += self.turns[turn].new_ids
        return Ask(body={**body, "prompt": ids}, prompt_len=len(ids), asked_tokens=max_tokens)

    def _answer_ids(self, reply: Reply) -> list[int]:
        """The answer's own ids if the endpoint sends them, else the ids of its text, repeated or cut to the counted tokens."""
        if reply.token_ids is not None:
            return reply.token_ids
        ids = self.encode(reply.text)
        if reply.completion_tokens is None:
            return ids
        num_tokens, ids = reply.completion_tokens, ids or list(self.turns[0].new_ids)
        return (ids * (num_tokens // len(ids) + 1))[:num_tokens]

    def with_prefix(self, prefix: Ids) -> "HttpConversation":
        first = self.turns[0]
        ids = prefix[: len(first.new_ids)]
        return replace(self, turns=(replace(first, new_ids=ids + first.new_ids[len(ids) :]), *self.turns[1:]))


@dataclass(frozen=True, kw_only=True)
class HttpWorkload:
    conversations: tuple[HttpConversation, ...]
    provenance: Any

    def with_prefixes(self, nonce: str) -> "HttpWorkload":
        """The workload with a unique prefix for each conversation."""
        conversations = [each.with_prefix(self._prefix(f"{nonce}/{each.session_id}")) for each in self.conversations]
        return replace(self, conversations=tuple(conversations))

    def warm_up(self, name: str) -> HttpConversation:
        """A conversation to warm up with: the one with the longest first turn, with a prefix that no other has."""
        longest = max(self.conversations, key=lambda each: len(each.turns[0].new_ids))
        return longest.with_prefix(self._prefix(name))

    def _prefix(self, name: str) -> Ids:
        """A prefix drawn from the prompts' own ids, so that its ids are valid."""
        rng = random.Random(name)
        return tuple(rng.choice(self._known_ids) for _ in range(PREFIX_TOKENS))

    @cached_property
    def _known_ids(self) -> list[int]:
        return sorted({token_id for conversation in self.conversations for token_id in conversation.turns[0].new_ids})


def prompt_bounds(ask: Ask) -> tuple[int, int]:
    """The fewest and the most prompt tokens that an endpoint can truthfully count. For ids both are their number. For text they bound
    what a tokenizer and a template make of it."""
    messages = ask.body.get("messages")
    if messages is None:
        return ask.prompt_len, ask.prompt_len
    texts = [str(message["content"]) for message in messages]
    fewest = sum(len(" ".join(text.split())) for text in texts) // CHARACTERS_OF_TOKEN
    room = TEMPLATE_TOKENS + TEMPLATE_TOKENS // 16 * len(texts)
    return max(1, fewest), sum(len(text.encode()) for text in texts) + room


@file_cache(maxsize=2)
def tokenizer_of(name: str) -> TextTokenizer:
    """The tokenizer of any checkpoint. It needs no mask token, because autoregressive models have none."""
    folder = TINY_DIR if name == "tiny" else checkpoint_dir(name, weights=False)
    return load_tokenizer(folder, required=())


def workload_of(cell: Cell, knobs: HttpKnobs, model: str, context: int | None) -> HttpWorkload:
    """The workload of a cell: a data set's requests or a trace's sessions. ``context`` is the model's longest context in tokens, if it is
    known."""
    tokenizer = tokenizer_of(knobs.tokenizer or "tiny")
    fields: dict[str, Any] = {"model": model, "stream": True, "stream_options": {"include_usage": True}}
    fields |= {"temperature": knobs.temperature, **knobs.extra_fields}
    if knobs.ignore_eos:
        fields["ignore_eos"] = True
    make = partial(
        HttpConversation,
        is_chat=knobs.endpoint.api == "chat",
        fields=fields,
        decode=tokenizer.decode,
        encode=tokenizer.encode,
    )
    file = trace_source(cell.dataset, knobs, cell.requested)
    is_of_rounds = cell.dataset.lower() in known_session_cards()
    if file is not None:
        is_of_rounds = max(len(session.rounds) for session in trace_of(file, cell.seed).sessions) > 1
    if is_of_rounds:
        return _sessions(cell, knobs, file, tokenizer, make)
    requests = (
        _requests(cell, knobs, context, tokenizer) if file is None else _traced(cell, knobs, file, context, tokenizer)
    )
    require(
        knobs.delay_mean_s is None,
        f"delay_mean_s={knobs.delay_mean_s} has no effect on requests of one turn: leave it out",
    )
    conversations = tuple(
        make(
            session_id=request.request_id,
            arrival_s=request.arrival_s,
            turns=(Turn(new_ids=request.prompt_ids or (), asked_tokens=request.generation.gen_length),),
            delays_s=(0.0,),
            seed=request.generation.seed,
        )
        for request in requests.requests
    )
    return HttpWorkload(conversations=conversations, provenance=requests.provenance)


def _within_context(knobs: HttpKnobs, context: int, dataset: str) -> HttpKnobs:
    """The knobs with the lengths that a model of this context gets in runs without a server. A task's problems keep their length."""
    is_whole = knobs.input_len is not None or dataset.lower() in TASKS
    scale = 1.0 if is_whole else length_scale_for(context)
    room = max(min(LONGEST_PROMPT, context - knobs.gen_length), knobs.input_len or 0)
    require(
        room >= 1 or knobs.max_prompt_len is not None,
        f"gen_length={knobs.gen_length} leaves no token for a prompt of the {context} that the endpoint is taken to hold: lower it, "
        f"or give --knob max_prompt_len",
    )
    return replace(
        knobs,
        length_scale=scale if knobs.length_scale is None else knobs.length_scale,
        max_prompt_len=room if knobs.max_prompt_len is None else knobs.max_prompt_len,
    )


def _arrivals(cell: Cell, knobs: HttpKnobs) -> ArrivalConfig:
    """The arrivals of a cell. They follow a gamma process if only ``burstiness``, its shape, is given."""
    if cell.rate is not None and knobs.burstiness not in (None, 1):
        knobs = replace(knobs, arrivals=knobs.arrivals or "gamma")
    return arrivals_of(cell.rate, knobs)


def _requests(cell: Cell, knobs: HttpKnobs, context: int | None, tokenizer: TextTokenizer) -> Workload:
    """The requests of a data set, with the lengths for a model of this context."""
    knobs = _within_context(knobs, context or EMBEDDED_CONTEXT, cell.dataset)
    return build_workload(
        WorkloadConfig(
            dataset=cell.dataset,
            num_requests=knobs.num_prompts,
            seed=cell.seed,
            arrivals=_arrivals(cell, knobs),
            max_prompt_len=knobs.longest_prompt,
            min_prompt_len=min(MIN_PROMPT_LEN, knobs.input_len or knobs.longest_prompt),
            source=knobs.dataset_source,
            dataset_path=knobs.dataset_path,
            time_unit=knobs.time_unit,
            length_scale=1.0 if knobs.length_scale is None else knobs.length_scale,
            fixed_prompt_len=knobs.input_len,
        ),
        whole_answer(knobs.gen_length),
        encode=tokenizer.encode,
    )


def _traced(cell: Cell, knobs: HttpKnobs, file: Traced, context: int | None, tokenizer: TextTokenizer) -> Workload:
    """The requests of a file's rows, with their own lengths, within the context that the model is known to have."""
    return traced_workload(
        file,
        _arrivals(cell, knobs),
        cell.seed,
        whole_answer,
        most=context or MOST_TOKENS,
        num=knobs.num_prompts if "num_prompts" in cell.requested else None,
        length_scale=1.0 if knobs.length_scale is None else knobs.length_scale,
        fixed_prompt_len=knobs.input_len,
        encode=tokenizer.encode,
    )


def _sessions(
    cell: Cell, knobs: HttpKnobs, file: Traced | None, tokenizer: TextTokenizer, make: Callable[..., HttpConversation]
) -> HttpWorkload:
    require(knobs.input_len is None, f"input_len={knobs.input_len} has no effect on sessions: use length_scale instead")
    workload = build_sessions(
        SessionWorkloadConfig(
            trace=cell.dataset,
            num_sessions=knobs.num_prompts
            if file is None or "num_prompts" in cell.requested
            else len(trace_of(file, cell.seed).sessions),
            seed=cell.seed,
            arrivals=_arrivals(cell, knobs),
            source="embedded" if knobs.dataset_source == "auto" and knobs.dataset_path is None else "local",
            trace_path=knobs.dataset_path,
            delay_mean_s=knobs.delay_mean_s,
            file=file,
        )
    )
    conversations = tuple(
        make(
            session_id=session.session_id,
            arrival_s=session.arrival_s,
            turns=_turns(session, knobs, tokenizer, derive_seed(cell.seed, "text", session.session_id)),
            delays_s=tuple(entry.delay_s for entry in session.rounds),
            seed=derive_seed(cell.seed, "generation", session.session_id),
        )
        for session in workload.sessions
    )
    return HttpWorkload(conversations=conversations, provenance=workload.provenance)


def _turns(session: Session, knobs: HttpKnobs, tokenizer: TextTokenizer, seed: int) -> tuple[Turn, ...]:
    rng, turns, total = random.Random(seed), [], 0
    scale = 1.0 if knobs.length_scale is None else knobs.length_scale
    for entry in session.rounds:
        new_tokens, answer_len = (max(1, round(scale * n)) for n in (entry.prefill_tokens, entry.decode_tokens))
        total += new_tokens
        if total > knobs.longest_prompt:
            raise UserError(
                f"session {session.session_id} has a prompt of {total} tokens, more than max_prompt_len="
                f"{knobs.longest_prompt}: lower length_scale={scale:g}, or raise max_prompt_len"
            )
        turns.append(Turn(new_ids=_ids(tokenizer, rng, new_tokens), asked_tokens=answer_len))
        total += answer_len
    return tuple(turns)


def _ids(tokenizer: TextTokenizer, rng: random.Random, num: int) -> Ids:
    """Ids of generated text."""
    ids: list[int] = []
    while len(ids) < num:
        ids += tokenizer.encode(f" {more_text('chat', rng, num - len(ids))}")
    return tuple(ids[:num])
