"""``repro eval``."""

import json
from pathlib import Path

import pytest
from support.command import repro

from engines.dllm.serve import DLLM_SERVE
from repro.cli.evaluate import _cache


@pytest.mark.usefixtures("no_data")
def test_command(tmp_path):
    asked = (
        "eval --task mini-code --limit 3 --gen-length 40 --block-length 8 --selection dense",
        "--result-dir",
        tmp_path,
    )
    done = repro(*asked, "--json")
    assert (done.code, done.err.split(",")[0]) == (0, "1 run done")
    result = json.loads(done.out)
    said = (result["task"], result["criterion"], result["obtained"], result["valid"])
    assert said == ("mini-code", "pass@1", "measured", True)
    assert result["accuracy"]["value"] == result["accuracy_strict"]["value"] == 1.0
    assert (result["selection"], result["retention"]) == ("dense", 1.0)
    assert Path(result["file"]).is_file()
    again = repro(*asked)
    assert (again.code, "0 runs done, 1 reused" in again.err) == (0, True)
    assert "100.0 % (43.9 to 100.0 %, n = 3)" in again.out
    assert "all context rows" in again.out


def test_what_a_preset_leaves_out_stands_beside_its_accuracy():
    said = {name: _cache(DLLM_SERVE.sampler("llada", {"preset": name})) for name in ("exact", "balanced")}
    assert said == {
        "exact": "all context rows",
        "balanced": "all context rows, settle_after=1, full_every=4, renew_at=2",
    }
    settled = DLLM_SERVE.sampler("llada", {"settle_after": 2})
    assert _cache(settled) == "50 % of the context rows (head), settle_after=2"
