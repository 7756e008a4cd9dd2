"""Settings of a server and of a served causal model. Imports are light, because ``repro serve`` reads its options from here."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from engines.data import installed
from engines.errors import UserError, require
from engines.knobs import Checked, Count, Knob, Memory, Needs, Only, Proportion, Range, Tokens, free_knobs, with_knobs
from engines.laps.ours import OnTimeConfig
from engines.policies.own import BATCHER, Kind, Plugin

Held = Annotated[int, Range(1, 1 << 30)]
"""A number of waiting requests, of connections or of bytes."""
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/?#@*\sA-Z]+")
"""An origin as browsers write it."""
Seconds = Annotated[float, Range(above=0, most=86_400)]


@dataclass(frozen=True, kw_only=True)
class ServerSettings(Checked):
    host: str = "127.0.0.1"
    """Address to listen on."""
    port: Annotated[int, Range(0, 65_535)] = 8000
    """Port to listen on; 0 is any that is free."""
    max_queue: Held = 4096
    """Requests that may wait; one more is refused with 429."""
    request_timeout: Seconds = 600.0
    """Seconds for a request, waiting included; a request may ask for less."""
    drain_timeout: Seconds = 60.0
    """Seconds for requests to end after SIGTERM; those that are left then fail."""
    api_key: str | None = None
    """The bearer token that clients must send to /v1, /tokenize and /detokenize; None asks for none."""
    unknown_fields: Literal["count", "refuse"] = "count"
    """count or refuse unknown fields of requests: counted ones have no effect and appear in /metrics."""
    allow_origin: tuple[str, ...] = ()
    """Origins whose pages may use the server from a browser, such as 'https://example.org'; '*' is any."""
    max_body_bytes: Held = 1 << 22
    max_bytes_in_flight: Held = 1 << 26
    """Most bytes of the bodies of all requests under way; small bodies are taken even beyond."""
    body_timeout_s: Seconds = 30.0
    """Seconds for a body to arrive whole."""
    max_connections: Held = 4096

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            self.host.strip() != "",
            f"host={self.host!r} is empty: give an address, or 0.0.0.0 for all of this machine's",
        )
        key = self.api_key
        # The error does not show the key, which may be a real one with a typo.
        require(
            key is None or (key.isascii() and key.isprintable() and " " not in key and key != ""),
            "api_key must be printable ASCII without blanks: choose another",
        )
        for origin in self.allow_origin:
            require(
                origin == "*" or _ORIGIN.fullmatch(origin) is not None,
                f"allow_origin={origin!r} is no origin: give scheme://host or scheme://host:port in small letters, without "
                f"a path or a slash at the end",
            )


SYSTEM = "ar"
SCHEDULERS = ("chunked", "prefill-first", "sglang", "laps", "reserve", "on-time")
TIMED = ("laps", "reserve", "on-time")
"""Schedulers that time the machine's steps, and have an objective."""
DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
_SCHEDULER = Kind(
    name="scheduler",
    method="next_step",
    arguments=BATCHER.arguments,
    offered=("max_num_batched_tokens", "max_num_seqs"),
)


def user_batcher(name: str, knobs: tuple[tuple[str, Any], ...] = ()) -> Plugin | None:
    """Return a user's own batching policy with its knobs; None for a name in ``SCHEDULERS``. Raises UserError for an unknown name."""
    if name in SCHEDULERS:
        return None
    import_path = name if ":" in name else installed(BATCHER.name).get(name)
    if import_path is None:
        names = ", ".join((*SCHEDULERS, *installed(BATCHER.name)))
        raise UserError(f"scheduler={name!r} is unknown with system='{SYSTEM}': use one of {names}, or module:NAME")
    return Plugin(kind=_SCHEDULER, where=import_path, given=knobs)


def scheduler_knobs(name: str, knobs: tuple[tuple[str, Any], ...] = ()) -> Mapping[str, Knob]:
    """Return the scheduler's own knobs, beside the settings of all schedulers."""
    if name == "on-time":
        return free_knobs(OnTimeConfig)
    batcher = user_batcher(name, knobs)
    return {} if batcher is None else batcher.knobs


@dataclass(frozen=True, kw_only=True)
class ArSettings(Checked):
    """Settings of the engine. If a value is None, the device or the checkpoint decides it."""

    model: str
    """Checkpoint directory or hub id of a Qwen2, Qwen3, Llama or Mistral, or a shape with random weights."""
    weights: Literal["checkpoint", "random"] = "checkpoint"
    """checkpoint, or random for a shape without a download."""
    dtype: Literal["float32", "float16", "bfloat16"] | None = None
    """float32, float16 or bfloat16."""
    quantization: Annotated[Literal["none", "int8"], Needs(device="cpu", dtype=(None, "float32", "bfloat16"))] = "none"
    """int8 keeps the weights of products as int8, with a scale an output: on a CPU, for models without experts."""
    device: str = "cpu"
    """cpu, cuda or cuda:N."""
    scheduler: str = "chunked"
    """chunked, prefill-first, sglang, laps, reserve, on-time, or your own class as module:NAME."""
    slo_ttft_s: Annotated[float, Range(1e-6, 1e6), Only(scheduler=TIMED)] | None = None
    """With ar, objective of the time to the first token, in seconds [default: 20 steps of one token]."""
    max_num_batched_tokens: Tokens = 2048
    """Query tokens per step."""
    max_num_seqs: Count = 256
    """Requests running at once."""
    max_model_len: Annotated[int, Range(2, 2**20)] | None = None
    """With ar, most tokens of a prompt and its answer [default: the model's positions]."""
    kv_tokens: Annotated[int, Range(2)] | None = None
    """With ar, tokens of K/V in the pool [default: what memory leaves; on a CPU 1 GiB of them]."""
    memory_limit: Memory | None = None
    """Bytes of the device to use, weights included."""
    keep_kv: bool = True
    """With ar, keep the K/V of answers for prompts that continue them."""
    gen_length: Annotated[int, Range(1, 2**17)] = 256
    """Tokens of an answer if a request asks for no number."""
    temperature: Annotated[float, Range(0, 1e6)] = 0.0
    """0 is greedy."""
    top_p: Annotated[Proportion, Needs(temperature=Range(above=0))] = 1.0
    """Sample from the most probable tokens, as many as reach this sum of probabilities."""
    own: tuple[tuple[str, Any], ...] = ()
    """Knobs of on-time, or of your own scheduler."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if (batcher := user_batcher(self.scheduler, self.own)) is not None:
            batcher.make_checked(max_num_batched_tokens=self.max_num_batched_tokens, max_num_seqs=self.max_num_seqs)
        elif self.scheduler == "on-time":
            with_knobs(OnTimeConfig(), dict(self.own))
