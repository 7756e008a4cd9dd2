"""What a run of prefill instances records: a request is one turn, done with its first token."""

from __future__ import annotations

from engines.laps.record import InstanceRow, MoveRow, StepRow
from repro.runs.record import Column, columns_of

STEPS, MOVES, INSTANCES = "steps", "moves", "instances"

REQUEST_COLUMNS: tuple[Column, ...] = (
    Column("session_id", "int", "the conversation it is a turn of"),
    Column("turn", "int", "0 is the first"),
    Column("length_class", "str", "short or long, by the run's boundary"),
    Column("history", "int", "tokens whose K/V was there"),
    Column("instance", "int", "where it was prefilled", nullable=True),
    Column("violated", "bool", "whether its first token came later than the objective allows, or never"),
    Column("counted", "bool", "whether it arrived in the measured window"),
)
STEP_COLUMNS = columns_of(StepRow)
MOVE_COLUMNS = columns_of(MoveRow)
INSTANCE_COLUMNS = columns_of(InstanceRow)
