"""Runs as a tidy table: a row a run, a column for whatever was asked and for every number that came of it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from repro.files import rewriting
from repro.runs.store import StoredRun
from repro.workbench.folder import columns_of, row_of

if TYPE_CHECKING:
    import pandas as pd

FORMATS = ("csv", "parquet")


def frame_of(runs: Sequence[StoredRun]) -> pd.DataFrame:
    """What a run has no value of is missing there."""
    import pandas as pd

    rows = [row_of(run) for run in runs]
    return pd.DataFrame([{**row.asked, **row.knobs, **row.made} for row in rows], columns=columns_of(rows))


def write_frame(frame: pd.DataFrame, kind: str, out: Path) -> None:
    """A knob whose values are of several kinds is written as text: a column of parquet has one kind."""
    with rewriting(out) as temporary:
        if kind == "csv":
            temporary.write_text(frame.to_csv(index=False), encoding="utf-8")
        else:
            _of_one_kind(frame).to_parquet(temporary, index=False)


def _of_one_kind(frame: pd.DataFrame) -> pd.DataFrame:
    from pandas.api.types import infer_dtype

    mixed = [name for name in frame if infer_dtype(frame[name], skipna=True).startswith("mixed")]
    return frame.assign(**{name: frame[name].map(str, na_action="ignore") for name in mixed})
