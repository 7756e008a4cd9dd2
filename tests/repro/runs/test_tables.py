"""Tables in files: a column's Arrow array is what pyarrow itself makes of the values."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from repro.paths import REPO
from repro.runs.record import Column
from repro.runs.tables import _array, encoded_table

pa = pytest.importorskip("pyarrow")

KINDS = {
    "int": (pa.int64(), st.integers(-(2**63), 2**63 - 1)),
    "float": (pa.float64(), st.floats(allow_nan=False, allow_infinity=False)),
    "str": (pa.string(), st.text(max_size=5)),
    "bool": (pa.bool_(), st.booleans()),
}


@pytest.mark.parametrize("kind", KINDS)
@given(st.data())
def test_arrays_are_pyarrows(kind: str, data: st.DataObject) -> None:
    arrow, values = KINDS[kind]
    column = data.draw(st.lists(st.none() | values, max_size=20))
    made, expected = _array(column, arrow), pa.array(column, type=arrow)
    made.validate(full=True)
    assert made.equals(expected)
    assert made.null_count == expected.null_count


@pytest.mark.parametrize(
    ("kind", "value"), [("int", 1.5), ("int", 2**63), ("int", "1"), ("bool", 1), ("float", "1"), ("str", 1)]
)
def test_a_value_of_another_kind_is_not_stored_as_one_like_it(kind: Any, value: object) -> None:
    with pytest.raises(TypeError):
        encoded_table("t", {"c": [value]}, [Column(name="c", kind=kind, meaning="")])


def test_storing_a_run_does_not_import_pandas() -> None:
    code = """
import sys
from repro.runs.record import Column
from repro.runs.tables import encoded_table
columns = [Column(name=kind, kind=kind, nullable=True, meaning="") for kind in ("int", "float", "str", "bool")]
encoded_table("t", {"int": [1, None], "float": [None, 0.5], "str": ["a", None], "bool": [None, True]}, columns)
print("pyarrow" in sys.modules, "pandas" in sys.modules)
"""
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=REPO).stdout
    assert said.split() == ["True", "False"]
