"""Nothing that is written or printed names a secret or a home folder; what only looks like one is left."""

import json
from pathlib import Path

import pytest
from support.tables import data_beside

from engines.knobs import knobs_of
from repro.runs.cell import Cell
from repro.runs.clean import clean_value, is_secret, without_secrets
from repro.runs.system import SYSTEMS, settings_of

VALUE = "harmless-9f3e"
SECRETS = data_beside(__file__, "secrets")


@pytest.mark.parametrize("name", SECRETS["names"])
def test_names_of_secrets_in_any_spelling(name):
    assert is_secret(name)
    nested = {"a": [{"b": {name: VALUE, "steps": 8}}]}
    texts = [
        json.dumps(nested),
        f"extra={json.dumps(nested)} is unknown",
        json.dumps({"inner": json.dumps(nested)}),
        f"{name}={VALUE}",
    ]
    texts += [
        f"http://h:1/v1?steps=8&{name}={VALUE}",
        json.dumps(nested)[:-2],
        str(nested),
        f"knob={json.dumps(json.dumps(nested))}",
    ]
    for text in texts:
        assert VALUE not in without_secrets(text), text
    assert VALUE not in json.dumps(clean_value({"extra": json.dumps(nested), "deep": nested}))
    assert clean_value(nested)["a"][0]["b"]["steps"] == 8


@pytest.mark.parametrize("text", SECRETS["forms"])
def test_what_has_the_form_of_a_secret(text):
    found = without_secrets(f"said: {text.replace('VALUE', VALUE)}, and more")
    assert VALUE not in found
    assert "abcdef1234" not in found
    assert "Abc_123456" not in found
    assert found.startswith("said: ")
    assert found.endswith(", and more")


@pytest.mark.parametrize("text", SECRETS["plain"])
def test_what_is_no_secret_is_left_as_it_is(text):
    assert without_secrets(text) == text


def test_no_setting_of_ours_is_taken_for_a_secret():
    names = {name for system in SYSTEMS for kind in settings_of(system) for name in knobs_of(kind)}
    assert len(names) > 50
    assert [name for name in names if is_secret(name)] == []


def test_what_the_environment_holds_as_a_secret_is_known_by_its_value(monkeypatch):
    monkeypatch.setenv("SOME_API_KEY", "plainword123")
    assert clean_value({"error": "no such key: plainword123"}) == {"error": "no such key: ***"}


def _cell(**knobs: str) -> Cell:
    return Cell(system="openai-http", dataset="osc", platform="endpoint", executor="torch", knobs=tuple(knobs.items()))


def test_a_cell_is_known_by_all_but_its_secrets(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    first = _cell(extra=json.dumps({"api_key": VALUE, "top_k": 1}), dataset_path=f"{tmp_path}/mine/x.csv")
    other = _cell(extra=json.dumps({"api_key": "another", "top_k": 1}), dataset_path=f"{tmp_path}/mine/x.csv")
    assert first.key == other.key
    assert (
        first.key != _cell(extra=json.dumps({"api_key": VALUE, "top_k": 2}), dataset_path=f"{tmp_path}/mine/x.csv").key
    )
    written = first.written()
    assert VALUE not in str(written)
    assert str(tmp_path) not in str(written)
    again = Cell.from_written(json.loads(json.dumps(written)))
    assert (again.key, again.knob_values["dataset_path"]) == (first.key, str(tmp_path / "mine" / "x.csv"))


@pytest.mark.parametrize("text", ["/mnt{home}/x", "{home}x/y", "{home}.old"])
def test_another_folder_is_not_taken_for_the_home(text, monkeypatch):
    monkeypatch.setenv("HOME", "/home/alice")
    told = text.format(home=Path.home())
    assert clean_value(told) == told
