"""What a run of prefill instances records: a request is one turn, done with its first token."""

from __future__ import annotations

from engines.laps.record import InstanceRow, MoveRow, StepRow
from repro.runs.record import Column, columns_of

STEPS, MOVES, INSTANCES = "steps", "moves", "instances"

REQUEST_COLUMNS: tuple[Column, ...] = (
    Column(name="session_id", kind="int", meaning="the conversation it is a turn of"),
    Column(name="turn", kind="int", meaning="0 is the first"),
    Column(name="length_class", kind="str", meaning="short or long, by the run's boundary"),
    Column(name="history", kind="int", meaning="tokens whose K/V was there"),
    Column(name="instance", kind="int", nullable=True, meaning="where it was prefilled"),
    Column(
        name="violated", kind="bool", meaning="whether its first token came later than the objective allows, or never"
    ),
    Column(name="counted", kind="bool", meaning="whether it arrived in the measured window"),
)
STEP_COLUMNS = columns_of(StepRow)
MOVE_COLUMNS = columns_of(MoveRow)
INSTANCE_COLUMNS = columns_of(InstanceRow)
