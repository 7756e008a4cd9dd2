"""What a run on the simulated cluster records: a request is a session, and rounds, prefills, transfers and workers have
tables of their own."""

from __future__ import annotations

from typing import get_args

from engines.ar.metrics import ItlStat
from engines.ar.record import RoundRow, TaskRow, TransferRow, WorkerRow
from repro.runs.record import Column, columns_of

ROUNDS, TASKS, TRANSFERS, WORKERS = "rounds", "tasks", "transfers", "workers"

ITL_STATS: tuple[ItlStat, ...] = get_args(ItlStat)


def _itl_columns(scope: str) -> tuple[Column, ...]:
    return tuple(
        Column(
            f"itl_{stat}_s", "float", f"{stat} gap between tokens of the {scope}; null where it has none", nullable=True
        )
        for stat in ITL_STATS
    )


REQUEST_COLUMNS: tuple[Column, ...] = (
    Column("num_rounds", "int", "rounds of the session, those never reached included"),
    Column("decode_tokens", "int", "tokens to generate, over all rounds"),
    Column("worker_id", "int", "the decode worker it is bound to"),
    *_itl_columns("session"),
)
ROUND_COLUMNS: tuple[Column, ...] = (*columns_of(RoundRow), *_itl_columns("round"))
TASK_COLUMNS = columns_of(TaskRow)
TRANSFER_COLUMNS = columns_of(TransferRow)
WORKER_COLUMNS = columns_of(WorkerRow)
