"""cell"""

import hashlib
import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.cells import a_cell
from support.refusals import refuses
from support.tables import data_beside

import repro.runs.cell
from engines.errors import UserError
from engines.models.checkpoint import TINY_DIR
from repro.runs.cell import Cell
from repro.runs.experiment import prepare

CASES = data_beside(__file__, "cases")

CELL = Cell(
    figure="fig3",
    system="dllm-serve",
    dataset="burst",
    platform="rtx4090",
    executor="roofline",
    rate=0.5,
    seed=0,
    knobs=(("retention_ratio", 0.5), ("max_num_logits", 2048)),
)

scalars = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False, allow_infinity=False), st.text()
)
knobs = st.dictionaries(st.text(min_size=1).filter(str.strip), scalars, max_size=4)


def test_key_is_pinned():
    # A change here means that every stored run is orphaned: raise CELL_SCHEMA_VERSION and say so.
    text = (
        '{"dataset":"burst","executor":"roofline","knobs":{"max_num_logits":2048,"retention_ratio":0.5},'
        '"platform":"rtx4090","rate":0.5,"schema":1,"seed":0,"system":"dllm-serve"}'
    )
    assert CELL.key == hashlib.sha256(text.encode()).hexdigest()[:12]
    assert CELL.folder_name == f"dllm-serve_burst_rtx4090_roofline_r0.5_s0_{CELL.key}"


def test_another_seed_and_another_figure_are_as_if_made_anew():
    for cell in (replace(CELL), CELL):  # without a key that is known, and with one
        again, elsewhere = cell.with_seed(7), cell.with_figure("fig5")
        for found, made in ((again, replace(cell, seed=7)), (elsewhere, replace(cell, figure="fig5"))):
            assert found == made
            assert (found.key, found.folder_name) == (made.key, made.folder_name)
        assert elsewhere.key == CELL.key != again.key
    assert (CELL.seed, CELL.figure) == (0, "fig3")
    with refuses("seed=-1"):
        CELL.with_seed(-1)
    with refuses("seed=True"):
        CELL.with_seed(True)
    with refuses("figure=' '"):
        CELL.with_figure(" ")


@pytest.mark.parametrize("change", CASES["fields of the key"])
def test_everything_else_changes_the_key(change):
    assert replace(CELL, **change).key != CELL.key


def test_schema_changes_the_key(monkeypatch):
    monkeypatch.setattr(repro.runs.cell, "CELL_SCHEMA_VERSION", repro.runs.cell.CELL_SCHEMA_VERSION + 1)
    assert replace(CELL).key != CELL.key


def test_order_of_knobs_and_way_of_writing_a_number_do_not_matter():
    assert (
        Cell.from_dict({**CELL.to_dict(), "knobs": {"max_num_logits": 2048.0, "retention_ratio": 0.5}}).key == CELL.key
    )
    assert replace(CELL, rate=1).key == replace(CELL, rate=1.0).key
    assert CELL.knobs == (("max_num_logits", 2048), ("retention_ratio", 0.5))


def test_true_is_not_one():
    assert replace(CELL, knobs=(("pack", True),)).key != replace(CELL, knobs=(("pack", 1),)).key


@given(knobs)
def test_round_trip_through_json(values):
    cell = replace(CELL, knobs=tuple(values.items()))
    again = Cell.from_dict(json.loads(json.dumps(cell.to_dict())))
    assert again == cell
    assert again.key == cell.key
    assert again.knob_values == values


@given(st.text(min_size=1).filter(str.strip))
def test_folder_name_is_safe(system):
    name = replace(CELL, system=system).folder_name
    assert name.isascii()
    assert "/" not in name
    assert not name.startswith(".")
    assert len(name) < 120


@pytest.mark.parametrize(("change", "said"), CASES["refused fields"])
def test_bad_input_is_refused_by_name(change, said):
    with pytest.raises(UserError) as caught:
        Cell.from_dict({**CELL.to_dict(), **change})
    assert said in str(caught.value)


def test_missing_key_is_refused():
    values = CELL.to_dict()
    del values["platform"]
    with pytest.raises(UserError, match="'platform' is missing"):
        Cell.from_dict(values)


# -- what makes two measured runs the same run ------------------------------------------------------------


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return Path(shutil.copytree(TINY_DIR, tmp_path / "model"))


def key_of(model: Path) -> str:
    cell = a_cell(model=str(model), num_prompts=2)
    return prepare(cell).cell.key


@pytest.mark.parametrize(
    ("file", "change"),
    [
        ("config.json", lambda content: json.dumps({**json.loads(content), "rope_theta": 123.0}).encode()),
        ("model.safetensors", lambda content: content[:-1] + bytes([content[-1] ^ 1])),
        ("chat_template.jinja", lambda _: b"{{ messages[0].content }}"),
    ],
)
def test_another_checkpoint_is_another_run(model, file, change):
    before, path = key_of(model), model / file
    path.write_bytes(change(path.read_bytes() if path.exists() else b""))
    assert key_of(model) != before


def test_files_that_nobody_reads_make_no_difference(model):
    before = key_of(model)
    (model / "consolidated.safetensors").write_bytes(b"left over")
    (model / "README.md").write_text("about it")
    assert key_of(model) == before
