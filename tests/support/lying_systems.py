"""Systems of one's own whose parts, or whose runs, are not what a system's are."""

from collections.abc import Callable, Mapping
from typing import Any

from support.md1 import Jobs, Md1, Server

from repro.runs.cell import Cell
from repro.runs.record import REQUESTS, OnProgress, RunRecord


class _Changes(Server):
    def run(self, workload: Jobs, on_progress: OnProgress | None = None) -> RunRecord:
        made = super().run(workload, on_progress)
        tables = {name: {key: list(own) for key, own in table.items()} for name, table in made.tables.items()}
        changed: RunRecord = CHANGES[self.service_s](tables, made.manifest)
        return changed


class Prepares(Md1):
    def __init__(self, made: Callable[[], Any]) -> None:
        self.made = made

    def prepare(self, cell: Cell) -> Any:
        return self.made()


class Runs(Md1):
    """``service_s`` says what is changed."""

    def prepare(self, cell: Cell) -> Any:
        server, jobs = super().prepare(cell)
        return _Changes(service_s=server.service_s), jobs


def _with(column: str, value: object) -> Callable[..., RunRecord]:
    def change(tables: dict[str, dict[str, list[Any]]], manifest: Mapping[str, Any]) -> RunRecord:
        tables[REQUESTS][column][2] = value
        return RunRecord(tables=tables, manifest=manifest)

    return change


def _raises(tables: object, manifest: object) -> RunRecord:
    raise KeyError("soon")


CHANGES: Mapping[float, Callable[..., Any]] = {
    1.0: lambda tables, manifest: None,
    2.0: lambda tables, manifest: RunRecord(tables={REQUESTS: tables[REQUESTS]}, manifest=manifest),
    3.0: _with("finished_s", "soon"),
    4.0: _with("finished_s", float("nan")),
    5.0: lambda tables, manifest: RunRecord(tables=tables, manifest={**manifest, "obtained": "measured"}),
    6.0: _with("output_len", -5),
    7.0: _raises,
}


class Nameless(Md1):
    title = None


class Orphan(Md1):
    family = None


def _leaves() -> None:
    raise GeneratorExit


NOTHING, THREE, LEAVES = Prepares(lambda: None), Prepares(lambda: (1, 2, 3)), Prepares(_leaves)
RUNS, NAMELESS, ORPHAN = Runs(), Nameless(), Orphan()
