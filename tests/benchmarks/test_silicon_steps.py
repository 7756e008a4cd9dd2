"""The table of composed steps: what its columns are of, and that rows shared by lengths cost what the products say."""

import json

import pytest
import silicon_steps
from silicon_steps import causal_steps, mixings, refreshes

from engines.cost.kernels import Kernels
from engines.cost.roofline import H200, L40S
from engines.models.shape import LLADA_8B, QWEN2_5_7B


def test_a_refresh_is_bounded_by_its_datasheet_and_shown_for_every_framework():
    first = next(refreshes("l40s"))
    kernels = Kernels(LLADA_8B, L40S, "sglang")
    composed_s = kernels.layers_s(512) + kernels.prompt_s(512 * 512) + kernels.head_s(32)
    assert first.sglang_ms == pytest.approx(1e3 * composed_s)
    assert first.least_ms < min(first.vllm_ms, first.sglang_ms, first.trtllm_ms, first.roofline_ms)
    middle = sorted((first.vllm_ms, first.sglang_ms, first.trtllm_ms))[1]
    assert first.share == pytest.approx(first.least_ms / middle)


def test_prompts_and_decodes_have_no_overhead_in_them():
    prompt, *_, decode = causal_steps("h200", QWEN2_5_7B, 1)
    kernels = Kernels(QWEN2_5_7B, H200, "vllm")
    assert prompt.vllm_ms == pytest.approx(
        1e3 * (kernels.layers_s(128) + kernels.prompt_s(128 * 129 / 2) + kernels.head_s(1))
    )
    line = kernels.decode_line(128)
    assert decode.vllm_ms == pytest.approx(1e3 * (kernels.layers_s(128) + line.at(128 * 1024) + kernels.head_s(128)))
    assert all(each.least_ms < each.roofline_ms for each in (prompt, decode))


def test_mixing_costs_nothing_where_rows_cost_alike(monkeypatch):
    monkeypatch.setattr(Kernels, "_layers_s", lambda self, rows: 1e-6 * rows)
    assert all((row.least, row.median, row.most) == pytest.approx((0, 0, 0), abs=1e-12) for row in mixings("h200"))


def test_rows_are_written(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr("sys.argv", ["silicon_steps.py", "--kappa", "--json", str(tmp_path / "rows.json")])
    silicon_steps.main()
    rows = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert [row["model"] for row in rows] == ["Qwen2.5-7B"] * 3 + ["Qwen2.5-14B"] * 3 + ["Qwen2.5-32B"] * 3
    assert "Qwen2.5-14B" in capsys.readouterr().out
