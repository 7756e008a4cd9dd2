"""How readings are scored against Figure 4, and what Table 2 is worth without a planner."""

from __future__ import annotations

import numpy as np
import pytest
from ampd import SYSTEMS, measure, null_score, printed, score
from panels import RATES, largest_even_split, panels

from engines.ampd.system import AmpdConfig
from engines.ar.constants import TRIAL_R2
from engines.ar.slo import READINGS


def test_panels_are_those_of_figure_4() -> None:
    assert len(panels()) == 12
    assert [panel.num_gpus for panel in panels()[:4]] == [8, 32, 8, 16]
    llama = next(panel for panel in panels() if str(panel) == "Llama-3.1-70B DuReader")
    assert llama.gains[2.0].dynamo == pytest.approx(1.4447)
    assert (llama.slo.ttft_s, llama.slo.itl_s) == (5.0, 0.05)
    assert [str(plan) for plan in llama.plans] == ["P:TP4x2 D:TP8x1", "P:TP2x4 D:TP8x1", "P:TP8x1 D:TP8x1"]


def test_null_is_no_effect_anywhere() -> None:
    found = null_score()
    paper = printed()
    assert found["dynamo_off"] == pytest.approx(np.abs(np.log(paper["dynamo"])).mean())
    assert found["dynamo_off"] == pytest.approx(0.307, abs=1e-3)
    assert found["vllm_off"] == pytest.approx(0.966, abs=1e-3)
    assert found["llama_vllm_off"] == pytest.approx(0.431, abs=1e-3)


def test_printed_gains_score_zero() -> None:
    paper = printed()
    shares = np.empty((len(panels()), len(SYSTEMS), len(RATES)))
    shares[:, 0] = 0.9
    for place, name in enumerate(SYSTEMS[1:], start=1):
        shares[:, place] = 0.9 / paper[name.removesuffix("-tuned")]
    found = score(shares)
    assert found["score"] == pytest.approx(0.0, abs=1e-12)
    assert found["winner_right"] == 60
    assert found["ampd_not_worse"] == 59  # the printed -2.33 %
    assert 100 * found["gain_dynamo_median"] == pytest.approx(14.1, abs=0.3)
    assert 100 * found["gain_vllm_median"] == pytest.approx(70.6, abs=0.3)


def test_rule_of_the_largest_even_split_gets_ten_of_table_2() -> None:
    assert sum(largest_even_split(panel) == panel.plans[0] for panel in panels()) == 10


def test_measure_gives_a_share_for_every_system_rate_and_reading() -> None:
    index = next(place for place, panel in enumerate(panels()) if str(panel) == "Mixtral-8x7B HotpotQA")
    shares = measure(index, TRIAL_R2, 1, AmpdConfig())
    assert shares.shape == (len(SYSTEMS), len(RATES), len(READINGS))
    assert ((shares >= 0) & (shares <= 1)).all()
    mean, tail = (READINGS.index(each) for each in (READINGS[0], READINGS[3]))
    # Mean gaps meet an objective that their maxima meet; the others choose another deployment for each reading.
    assert (shares[:2, :, mean] >= shares[:2, :, tail]).all()
