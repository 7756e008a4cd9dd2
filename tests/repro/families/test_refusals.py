"""Cells that no family takes: those of ``refusals.yaml``, each refused in one sentence that names what is wrong."""

from typing import Any

import pytest
from support.cells import a_cell
from support.tables import data_beside

from engines.errors import UserError
from repro.runs.experiment import prepare

TABLES = data_beside(__file__, "refusals")
CASES = [
    pytest.param({**table["cell"], **change}, says, id=f"{name}: {', '.join(f'{k}={v}' for k, v in change.items())}")
    for name, table in TABLES.items()
    for change, *says in table["refused"]
]


@pytest.mark.parametrize(("asked", "says"), CASES)
def test_a_cell_is_refused_before_it_runs(asked: dict[str, Any], says: list[str]) -> None:
    with pytest.raises(UserError) as refused:
        prepare(a_cell(**asked))
    sentence = str(refused.value)
    assert says
    assert all(part in sentence for part in says), sentence
    assert "\n" not in sentence
