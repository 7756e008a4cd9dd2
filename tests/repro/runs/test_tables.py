"""Tables as they are stored: plain values that come back as they went."""

import json
from dataclasses import fields
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engines.cluster.record import RoundRow, TaskRow, WorkerRow, rows_of, table_of
from engines.laps.cluster import InstanceRow, StepRow
from repro.runs.family import Family, plain_table
from repro.runs.record import REQUEST_COLUMNS, Column, RunRecord, columns_of, empty_table

KINDS: dict[str, st.SearchStrategy[Any]] = {
    "int": st.integers() | st.integers(-(2**63), 2**63 - 1).map(np.int64),
    "float": st.floats(allow_nan=False, allow_infinity=False) | st.floats(-1, 1).map(np.float64) | st.integers(-9, 9),
    "str": st.text(max_size=5),
    "bool": st.booleans() | st.booleans().map(np.bool_),
}


def column(kind: Any) -> list[Column]:
    return [Column(name="c", kind=kind, nullable=True, meaning="")]


@pytest.mark.parametrize("kind", KINDS)
@given(st.data())
def test_values_come_back_as_they_went(kind, data):
    values = data.draw(st.lists(st.none() | KINDS[kind], max_size=20))
    plain = plain_table("t", {"c": values}, column(kind))
    assert json.loads(json.dumps(plain)) == plain == {"c": values}
    of_kind = {"int": int, "float": float, "str": str, "bool": bool}[kind]
    assert {type(value) for value in plain["c"] if value is not None} <= {of_kind}


@pytest.mark.parametrize(
    ("kind", "value"), [("int", 1.5), ("int", "1"), ("bool", 1), ("float", "1"), ("str", 1), ("float", 1j)]
)
def test_a_value_of_another_kind_is_not_stored_as_one_like_it(kind, value):
    with pytest.raises(TypeError, match=f"table t: column 'c' holds a value that is no {kind}"):
        plain_table("t", {"c": [value]}, column(kind))


@pytest.mark.parametrize(
    ("values", "is_finite"), [([1e308, 1e308], True), ([None, 1.0], True), ([1.0, float("inf")], False)]
)
def test_numbers_are_finite(values, is_finite):
    family = Family(name="any", tables={"t": tuple(column("float"))})
    record = RunRecord(tables={"requests": empty_table(REQUEST_COLUMNS), "t": {"c": values}})
    if is_finite:
        family.check_tables(record)
    else:
        with pytest.raises(ValueError, match="table t: column 'c' holds a value that is not finite"):
            family.check_tables(record)


def test_columns_are_read_off_the_rows_of_a_table():
    """A field is a column; the text below it, on one line, is what it means."""
    found = {column.name: column for column in columns_of(TaskRow)}
    assert list(found) == [field.name for field in fields(TaskRow)]
    assert (found["task_id"].kind, found["task_id"].nullable) == ("int", False)
    assert (found["started_s"].kind, found["started_s"].nullable) == ("float", True)
    assert (found["is_local"].kind, found["kind"].kind) == ("bool", "str")
    assert found["started_s"].meaning == "When it left its queue."
    pool = columns_of(InstanceRow)[1]
    assert (pool.name, pool.kind, pool.nullable) == ("pool", "str", True)
    assert all(column.meaning for row in (RoundRow, TaskRow, StepRow) for column in columns_of(row))


def test_a_table_is_its_rows_turned():
    rows = [WorkerRow(3, "decode", 8, 0), WorkerRow(4, "prefill", 1, 2, num_prefills=7)]
    table = table_of(WorkerRow, rows)
    assert (table["worker_id"], table["num_prefills"], table["kv_peak"]) == ([3, 4], [0, 7], [None, None])
    assert list(rows_of(table, "role", "server")) == [("decode", 0), ("prefill", 2)]
    assert table_of(WorkerRow, []) == {column.name: [] for column in columns_of(WorkerRow)}
