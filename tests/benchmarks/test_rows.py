"""Fewer rows problem by problem: pairs are counted as they are."""

from types import SimpleNamespace

import pytest
import rows

from paper_figures.dllm_serve.row_policies import PACES


def test_pairs_are_counted_as_they_are(monkeypatch):
    monkeypatch.setattr(rows, "rows_per_request", lambda run: 2.5)

    def ran(text):
        return SimpleNamespace(record=SimpleNamespace(requests={"correct": [letter == "1" for letter in text]}))

    row = rows.Row.of(("setting", "pace", "policy"), ran("0001110111"), "every row", ran("1111110000"))
    assert (row.solved, row.n, row.rows, row.lost, row.won) == (6, 10, 25, 3, 3)
    assert row.points == 0 == row.points_low + row.points_high
    assert row.points_high == pytest.approx(100 * 1.96 * 6**0.5 / 10, rel=1e-4)
    row = rows.Row.of(("setting", "pace", "policy"), ran("0000"), "every row", ran("0111"))
    assert (row.points, row.p_value) == (-75.0, 0.25)
    assert (row.lost, row.won) == (3, 0)
    assert row.points_low == pytest.approx(-75 - 100 * 1.96 * (3 / 16 * 4) ** 0.5 / 4, rel=1e-3)


def test_every_setting_asks_all_of_it_and_few_of_less_context():
    for setting in rows.WHERE:
        cells = list(rows.cells_of(setting, 500, 1))
        assert len({cell for _, _, cell in cells}) == len(cells)
        kept = [policy for _, policy, _ in cells if policy in rows.KEPT]
        assert len(kept) == (len(rows.KEPT) if setting.endswith(" 8") else 0)
        assert {pace for pace, policy, _ in cells if policy == rows.EVERY} == set(PACES)
