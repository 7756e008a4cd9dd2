"""A diffusion-LLM engine driven through a workload: what its steps say of requests, and the table of the steps."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from engines.dllm.engine import Engine
from engines.dllm.executor.replay import LETTERS, Recording
from engines.dllm.plan import Completion, Occupancy, PlanFacts, Request, StepRecord
from engines.dllm.scheduling.phase import Phase
from engines.runtime.step_timer import StepTimes
from repro.runs.drivers.steps import Clock, OnProgress, RequestLog, drive_steps, in_arrival_order
from repro.runs.record import REQUESTS, RunRecord, Table
from repro.systems.dllm.family import BLOCK_COLUMNS, BLOCKS, PART_COLUMNS, REQUEST_COLUMNS, STEP_COLUMNS, STEPS


def drive_engine(
    engine: Engine,
    requests: Iterable[Request],
    clock: Clock,
    *,
    on_progress: OnProgress | None = None,
    should_stop: Callable[[], bool] | None = None,
    recording: Recording | None = None,
) -> RunRecord:
    """The record's requests are in arrival order; those open when ``should_stop`` said so are ``unfinished``. ``recording`` is the
    engine's executor where its steps are noted."""
    ordered = in_arrival_order(requests)
    log = EngineLog(ordered)
    drive_steps(engine, ordered, clock, log, on_progress=on_progress, should_stop=should_stop)
    steps = log.step_table(engine.times())
    blocks = block_table({} if recording is None else recording.steps)
    return RunRecord(tables={REQUESTS: log.table, STEPS: steps, BLOCKS: blocks}, manifest={"obtained": clock.obtained})


def block_table(steps: Mapping[int, Mapping[int, Sequence[tuple[Phase, int]]]]) -> Table:
    """By request and the first position of a block: phase and committed tokens of its steps."""
    letters = {phase: letter for letter, phase in LETTERS.items()}
    table: Table = {column.name: [] for column in BLOCK_COLUMNS}
    for request_id in sorted(steps):
        for block, own in enumerate(steps[request_id].values()):
            phases, committed = "".join(letters[phase] for phase, _ in own), " ".join(str(count) for _, count in own)
            for name, value in zip(table, (request_id, block, phases, committed), strict=True):
                table[name].append(value)
    return table


_STEP = ("step", "start_s", "end_s", "duration_s", *PlanFacts._fields, *Completion._fields, *Occupancy._fields)
_OUTCOME = ("committed_tokens", "query_tokens", "logit_rows", "forward_s", "graph", "bound_s")
_LENGTHS = {
    "num_admitted": "admitted",
    "num_first_block": "first_block",
    "num_finished": "finished",
    "num_failed": "failed",
}
_MOST_ROWS = 1024
"""That wait for the columns: taken over one by one they would cost twice as much."""


class EngineLog(RequestLog):
    def __init__(self, ordered: Sequence[Request]) -> None:
        super().__init__(ordered, REQUEST_COLUMNS)
        self._gen_lengths = {request.request_id: request.generation.gen_length for request in ordered}
        self.table["gen_length"] = list(self._gen_lengths.values())
        self._steps: Table = {name: [] for name in (*_STEP, *_OUTCOME)}
        self._rows: list[tuple[object, ...]] = []
        """The last steps, not in the columns yet. A row kept of every step would be an object more for the collector."""
        self._parts: dict[int, Mapping[str, float]] = {}
        """By number of step, of those profiled."""

    def stamp(self, step: StepRecord, start: float, end: float) -> None:
        number, duration_s, plan, outcome, done, occupancy = step
        committed, query_rows, logit_rows, forward_s, _, graph, parts, bound_s, *_ = outcome
        told = (sum(committed), query_rows, logit_rows, forward_s, graph, bound_s)
        self._rows.append((number, start, end, duration_s, *plan, *done, *occupancy, *told))
        if len(self._rows) == _MOST_ROWS:
            self._flush()
        if parts is not None:
            self._parts[number] = parts
        for request_id in plan.admitted:
            self.set_once("admitted_s", request_id, start)
        for request_id in done.first_block:
            self.set_once("first_output_s", request_id, end)
        for request_id in done.finished:
            output_len = dict(done.stopped).get(request_id, self._gen_lengths.get(request_id))
            self.close(request_id, "ok", finished_s=end, output_len=output_len)
        for request_id, reason in done.failed:
            self.close(request_id, "failed", error=reason)

    def _flush(self) -> None:
        if self._rows:
            for column, values in zip(self._steps.values(), zip(*self._rows, strict=True), strict=True):
                column.extend(values)
            self._rows.clear()

    def step_table(self, late: Mapping[int, StepTimes]) -> Table:
        """``late``: by number of step, what the device said of it afterwards."""
        self._flush()
        columns = self._steps | {name: list(map(len, self._steps[of])) for name, of in _LENGTHS.items()}
        parts = self._parts | {number: times.parts for number, times in late.items()}
        if late:
            known = zip(columns["step"], columns["forward_s"], strict=True)
            columns["forward_s"] = [late[number].forward_s if number in late else seconds for number, seconds in known]
        for name, part in PART_COLUMNS.items():
            own = map(parts.get, columns["step"])
            columns[name] = [None if seconds is None else seconds[part] for seconds in own]
        return {column.name: columns[column.name] for column in STEP_COLUMNS}
