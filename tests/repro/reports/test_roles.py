"""The roles that claims.yaml writes, against what moves when the runs behind a comparison are changed."""

from collections.abc import Iterator
from functools import cache

import pytest
from support.perturbed_runs import unmoved

from repro.checks.results import usual_tables
from repro.paths import RESULTS
from repro.reports.claims import load_claims
from repro.reports.evidence import FigureSource, sources
from repro.reports.figures import PAPERS
from repro.reports.fitting import PROTOCOLS

ROLES = {claim.id: claim.role for paper in PAPERS for claim in load_claims(paper)}
ENTRIES = {entry.name: entry for paper in PAPERS.values() for entry in paper.entries}


@cache
def tables():
    return usual_tables(RESULTS)


def runs_of(source: FigureSource):
    if not source.cells:
        return []
    table = tables().get((source.entry.name, source.view.platform.name))
    if table is None:
        pytest.skip("its runs are gone")
    by_key = {run.figure_key: run for run in table.runs}
    return [by_key[cell.key] for cell in source.cells]


def misnamed(source: FigureSource, runs, roles) -> Iterator[str]:
    """Claims that are said to be by construction and move, or that do not move and are said to be found."""
    still = unmoved(source.findings, runs)
    for finding in source.findings(runs):
        if finding.comparable and (finding.claim in still) != (roles[finding.claim] == "by construction"):
            yield finding.claim


@pytest.mark.parametrize(
    ("name", "platform"), [(name, where) for name, entry in ENTRIES.items() for where in entry.load().deciding]
)
def test_what_no_run_can_change_is_by_construction_and_nothing_else(name, platform):
    (source,) = sources([ENTRIES[name]], [platform])
    assert list(misnamed(source, runs_of(source), ROLES)) == []


@pytest.mark.parametrize(("name", "role"), [("block/sglang", "by construction"), ("ampd/table1", "prediction")])
def test_a_wrong_role_is_found(name, role):
    source = sources([ENTRIES[name]])[0]
    runs = runs_of(source)
    claim = source.findings(runs)[0].claim
    assert list(misnamed(source, runs, {**ROLES, claim: role})) == [claim]


def test_what_the_roofline_is_fitted_to_is_fitted_there():
    targets = {claim for protocol in PROTOCOLS.values() for claim in protocol.targets}
    claims = [claim for paper in PAPERS for claim in load_claims(paper)]
    assert {claim.id for claim in claims if claim.role_by_roofline == "fitted"} == targets
    assert {claim.id for claim in claims if claim.chosen} == {claim.id for claim in claims if claim.role == "fitted"}
