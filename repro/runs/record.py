"""What one run leaves behind: a table of requests, a table of steps, and a manifest of facts.

Tables are plain ``dict[column, list]``: nothing heavy is imported to make or read one. All times are
seconds on the driver's clock since the run began.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from engines.runtime.step_timer import STEP_PARTS

SCHEMA_VERSION = 4
"""What is in the files of a stored run. Raise it with any change of columns, metrics or their meaning."""

Obtained = Literal["measured", "simulated"]
Status = Literal["ok", "failed", "unfinished"]
Kind = Literal["int", "float", "str", "bool"]
Table = dict[str, list[Any]]


@dataclass(frozen=True, kw_only=True)
class Column:
    name: str
    kind: Kind
    nullable: bool = False
    meaning: str


REQUEST_COLUMNS: tuple[Column, ...] = (
    Column(name="request_id", kind="int", meaning="as in the workload; unique in a run"),
    Column(name="arrival_s", kind="float", meaning="when the request was due"),
    Column(
        name="submit_lag_s", kind="float", nullable=True, meaning="submission minus due time; null if never submitted"
    ),
    Column(name="admitted_s", kind="float", nullable=True, meaning="start of the step that first ran it"),
    Column(name="first_block_s", kind="float", nullable=True, meaning="end of the step completing its first block"),
    Column(name="finished_s", kind="float", nullable=True, meaning="end of its last step; null unless status is ok"),
    Column(name="prompt_len", kind="int", meaning="prompt tokens"),
    Column(name="gen_length", kind="int", meaning="tokens to generate"),
    Column(
        name="output_len",
        kind="int",
        nullable=True,
        meaning="tokens generated: gen_length, or up to and including the stop token that ended it; null unless status is ok",
    ),
    Column(name="status", kind="str", meaning="ok, failed, or unfinished (the run was stopped before its end)"),
    Column(name="error", kind="str", nullable=True, meaning="one sentence for a failed request, else null"),
    Column(
        name="correct",
        kind="bool",
        nullable=True,
        meaning="whether its answer solves the problem; null where nothing is graded",
    ),
    Column(
        name="correct_strict",
        kind="bool",
        nullable=True,
        meaning="the same by the task's stricter criterion; null where it has none",
    ),
)

PART_COLUMNS = {f"{part}_s": part for part in STEP_PARTS}
"""Of a profiled step: column -> part of the step (engines.dllm.plan)."""

STEP_COLUMNS: tuple[Column, ...] = (
    Column(name="step", kind="int", meaning="the engine's step number"),
    Column(name="start_s", kind="float", meaning="start on the driver's clock"),
    Column(name="end_s", kind="float", meaning="end on the driver's clock; start + duration on a virtual one"),
    Column(name="duration_s", kind="float", meaning="the step as the engine measured or charged it"),
    Column(
        name="forward_s",
        kind="float",
        nullable=True,
        meaning="the part inside the model's forward, by the device's time where there is one; null if never known",
    ),
    Column(name="num_refresh", kind="int", meaning="sequences in their Refresh phase"),
    Column(name="num_reuse", kind="int", meaning="sequences in their Reuse phase"),
    Column(name="query_tokens", kind="int", meaning="rows the forward computed, padding included"),
    Column(name="scheduled_tokens", kind="int", meaning="query tokens charged against the step's budget"),
    Column(name="logit_rows", kind="int", meaning="rows projected onto the vocabulary"),
    Column(name="committed_tokens", kind="int", meaning="tokens committed"),
    Column(name="kv_rows_used", kind="int", meaning="rows of the KV pool in use"),
    Column(name="kv_rows_total", kind="int", meaning="rows of the KV pool; 0 where there is no pool"),
    Column(name="num_running", kind="int", meaning="requests admitted and not finished"),
    Column(name="num_waiting", kind="int", meaning="requests submitted and not admitted"),
    Column(name="num_admitted", kind="int", meaning="requests admitted in this step"),
    Column(name="num_first_block", kind="int", meaning="requests whose first block completed in this step"),
    Column(name="num_finished", kind="int", meaning="requests finished in this step"),
    Column(name="num_failed", kind="int", meaning="requests given up in this step"),
    Column(name="graph", kind="bool", meaning="whether a captured CUDA graph ran the forward"),
    *(
        Column(name=name, kind="float", nullable=True, meaning=f"time in this part; null unless profiled: {part}")
        for name, part in PART_COLUMNS.items()
    ),
    Column(
        name="bound_s",
        kind="float",
        nullable=True,
        meaning="the roofline's lower bound of the step at the card's peaks; null where the card is unknown",
    ),
)


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """``steps`` is empty for a driver that cannot see an engine's steps (a server behind HTTP).

    Keys of ``manifest`` the harness reads, all JSON; others are kept as they are:

    - ``obtained`` (required to store): measured or simulated
    - ``calibration``: id of the calibration behind a simulated run, null if it has none
    - ``dataset``: where the requests came from (name, revision, checksum, sample ids)
    - ``max_num_batched_tokens``: the step's token budget, for the budget's occupancy
    - ``slos``: ``{name: {"e2el_s": limit, "ttfb_s": limit, "queue_wait_s": limit}}``, for goodput
    """

    requests: Table
    steps: Table
    manifest: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _check_table("requests", self.requests, REQUEST_COLUMNS)
        _check_table("steps", self.steps, STEP_COLUMNS)
        if self.manifest.get("obtained", "measured") not in get_args(Obtained):
            raise ValueError(f"obtained={self.manifest['obtained']!r} must be one of {', '.join(get_args(Obtained))}")

    @property
    def obtained(self) -> Obtained:
        if "obtained" not in self.manifest:
            raise ValueError("a run record must say how it was obtained: set manifest['obtained']")
        obtained: Obtained = self.manifest["obtained"]
        return obtained

    @property
    def num_requests(self) -> int:
        return len(self.requests["request_id"])

    @property
    def num_steps(self) -> int:
        return len(self.steps["step"])

    def with_manifest(self, **facts: Any) -> RunRecord:
        return RunRecord(requests=self.requests, steps=self.steps, manifest={**self.manifest, **facts})


def empty_table(columns: tuple[Column, ...]) -> Table:
    return {column.name: [] for column in columns}


def _check_table(name: str, table: Table, columns: tuple[Column, ...]) -> None:
    expected = [column.name for column in columns]
    if wrong := sorted(set(table) ^ set(expected)):
        raise ValueError(f"table {name}: column {wrong[0]!r} is {'unknown' if wrong[0] in table else 'missing'}")
    if len({len(values) for values in table.values()}) > 1:
        raise ValueError(f"table {name}: columns differ in length: { {k: len(v) for k, v in table.items()} }")
    for column in columns:
        if not column.nullable and None in table[column.name]:
            raise ValueError(f"table {name}: column {column.name!r} holds a null")
