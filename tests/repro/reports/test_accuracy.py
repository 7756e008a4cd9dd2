"""Which configuration of a system answers as the model without a cache does."""

from dataclasses import replace

import pytest
from support.cells import CPU_TINY, L40S

from engines.errors import UserError
from paper_figures.dllm_serve import accuracy, fig3, fig7
from repro.reports.figures import (
    CONFIGURATIONS,
    DENSE,
    SINGLE_REFRESH,
    TASKS,
    Configuration,
    Solved,
    View,
    accuracies,
    at_dense_accuracy,
    configuration_of,
    is_dense,
)
from repro.runs.cell import Cell
from repro.runs.experiment import prepare
from repro.runs.statistics import wilson_interval

CONTENDERS = dict.fromkeys(each.contender for each in CONFIGURATIONS)


def solved(count: int, n: int = 300) -> Solved:
    low, high = wilson_interval(count, n)
    return Solved(share=count / n, low=low, high=high, n=n)


def table(**counts: tuple[int, int]) -> dict[tuple[str, str, str], Solved]:
    """Of Sparse-dLLM, by percent kept; without a cache 290 of 300 are solved, whose interval begins at 281.6."""
    found = {
        ("sparse-dllm", f"{percent[1:]} % of the context", task): solved(count)
        for percent, own in counts.items()
        for task, count in zip(TASKS, own, strict=True)
    }
    return found | {(DENSE, "no cache", task): solved(290) for task in TASKS}


def test_the_least_kept_that_is_within_denses_interval_on_every_task():
    low = 300 * wilson_interval(290, 300)[0]
    assert 281 < low < 282
    both = table(k50=(282, 281), k70=(282, 282), k90=(290, 290), k95=(1, 1), k98=(1, 1), k100=(290, 290))
    assert dict(at_dense_accuracy("sparse-dllm", both).knobs) == {"retention_ratio": 0.7}
    # More than dense is dense as well.
    more = table(k50=(281, 300), k70=(281, 300), k90=(300, 300), k95=(0, 0), k98=(0, 0), k100=(0, 0))
    assert dict(at_dense_accuracy("sparse-dllm", more).knobs) == {"retention_ratio": 0.9}


def test_what_was_not_measured_is_not_dense():
    with pytest.raises(UserError, match="contender='sparse-dllm' has no configuration within the interval of dense"):
        at_dense_accuracy("sparse-dllm", table(k50=(100, 290)))


def test_the_committed_table_decides_for_every_contender():
    found = accuracies()
    assert {(each.contender, each.rule, task) for each in CONFIGURATIONS for task in TASKS} == set(found)
    for each in found.values():
        assert each.n >= 300
        assert (each.low, each.high) == pytest.approx(wilson_interval(round(each.share * each.n), each.n))
    for contender in CONTENDERS:
        assert is_dense(at_dense_accuracy(contender))


def test_a_missing_table_is_named(tmp_path):
    with pytest.raises(UserError, match=r"holds no accuracies \(FileNotFoundError\): make it by 'repro reproduce"):
        accuracies(tmp_path / "none.csv")


@pytest.mark.parametrize("each", CONFIGURATIONS, ids=lambda each: f"{each.contender} {each.rule}")
def test_a_run_finds_its_configuration(each: Configuration):
    assert configuration_of(each.system, {**dict(each.knobs), "num_prompts": 3}) == each


def test_defaults_are_known_and_what_was_not_measured_is_not():
    usual = configuration_of("dllm-serve", {"refresh_delay": 1})
    assert usual is not None
    assert usual.rule == "50 % of the context"
    single = configuration_of("dllm-serve", {"refresh_delay": 0})
    assert single is not None
    assert single.contender == SINGLE_REFRESH
    assert configuration_of("dllm-serve", {"selection": "uniform"}) is None
    assert configuration_of("dllm-serve", {"retention_ratio": 0.3}) is None


def kept(cells: list[Cell]) -> dict[str, set[object]]:
    found: dict[str, set[object]] = {}
    for cell in cells:
        found.setdefault(cell.system, set()).add(cell.knob_values.get("retention_ratio"))
    return found


@pytest.mark.parametrize("module", [fig3, fig7])
def test_a_dense_view_runs_every_system_at_the_accuracy_of_no_cache(module):
    usual = View(platform=L40S, reading="policy")
    dense = replace(usual, accuracy="dense")
    assert dense.stem == "l40s-policy-dense"
    cells = module.FIGURE.cells(dense)
    for system, ratios in kept(cells).items():
        assert ratios == {dict(at_dense_accuracy(system).knobs).get("retention_ratio")}
    assert set().union(*kept(module.FIGURE.cells(usual)).values()) == {None}
    for cell in cells[:8]:
        prepare(cell)


def test_measured_comparisons_of_either_accuracy_are_made_apart():
    view = View(platform=CPU_TINY, reading="efficient", accuracy="dense")
    assert {cell.comparison for cell in fig3.FIGURE.cells(view)} == {"rates-dense"}


def test_every_configuration_is_asked_the_same_problems():
    cells = accuracy.FIGURE.cells(View(platform=CPU_TINY, reading="efficient"))
    assert len({cell.key for cell in cells}) == len(cells) == len(CONFIGURATIONS) * len(TASKS)
    asked = {(cell.dataset, cell.seed, cell.knob_values["num_prompts"], cell.knob_values["steps"]) for cell in cells}
    assert asked == {(task, 0, accuracy.NUM_PROBLEMS, 40) for task in TASKS}
    with pytest.raises(UserError, match="accuracy needs a model that answers"):
        accuracy.FIGURE.cells(View(platform=L40S, reading="published"))
