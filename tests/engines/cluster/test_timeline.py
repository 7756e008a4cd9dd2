"""Single sessions through the cluster, every time by hand. A token is prefilled in 1 ms, a decode step takes 10 ms."""

import numpy as np
import pytest
from support.clusters import links, serve, session, simulation

from engines.cluster.record import ClusterRun, observe
from engines.policies.batching import Chunked


def gaps_of(run: ClusterRun, row: int) -> list[float]:
    """One by one, in milliseconds."""
    mine = run.gaps.row == row
    return [round(1e3 * gap, 6) for gap in np.repeat(run.gaps.gap_s[mine], run.gaps.tokens[mine]).tolist()]


def test_colocated_session():
    run = serve(simulation(), session(5, 1.0, (100, 5, 0.5), (50, 3)))
    assert run.rounds["ready_s"] == pytest.approx([1.0, 1.64])
    assert run.rounds["first_token_s"] == pytest.approx([1.1, 1.69])
    assert run.rounds["finished_s"] == pytest.approx([1.14, 1.71])
    assert run.rounds["history"] == [0, 105]
    assert run.sessions["finished_s"] == pytest.approx([1.71])
    assert run.sessions["status"] == ["ok"]
    assert gaps_of(run, 0) == [10, 10, 10, 10]
    assert run.tasks["kind"] == ["initial", "incremental"]
    assert run.tasks["is_local"] == [True, True]
    assert run.transfers["task_id"] == []


def test_remote_session_pays_for_its_history_and_its_increment():
    """0.1 ms a token of K/V: the increment of 100 tokens takes 10 ms, the history of 105 then 10.5 ms."""
    run = serve(simulation(prefills=1, kv_links=links(1e-4)), session(5, 1.0, (100, 5, 0.5), (50, 3)))
    assert run.rounds["first_token_s"] == pytest.approx([1.11, 1.7155])
    assert run.rounds["finished_s"] == pytest.approx([1.15, 1.7355])
    assert run.transfers["content"] == ["increment", "history", "increment"]
    assert run.transfers["tokens"] == [100, 105, 50]
    assert run.transfers["source"] == [100, 0, 100]
    assert run.transfers["start_s"] == pytest.approx([1.1, 1.65, 1.7105])
    assert run.tasks["started_s"] == pytest.approx([1.0, 1.6605])
    assert run.tasks["landed_s"] == pytest.approx([1.11, 1.7155])
    assert observe(run).ttft_s.tolist() == pytest.approx([0.11, 0.0655])


@pytest.mark.parametrize(("overlaps", "second_starts"), [(True, 2.3), (False, 2.31)])
def test_history_is_read_during_the_previous_prefill(overlaps, second_starts):
    """Session 1 has 100 tokens of history and asks for more at 2.1, while 300 tokens are prefilled from 2.0 to 2.3."""
    run = serve(
        simulation(prefills=1, kv_links=links(1e-4), overlaps=overlaps),
        session(1, 0.0, (99, 1, 1.9911), (50, 1)),
        session(2, 2.0, (300, 1)),
    )
    assert run.rounds["ready_s"] == pytest.approx([0.0, 2.0, 2.1])
    assert run.tasks["started_s"] == pytest.approx([0.0, 2.0, second_starts])
    assert run.tasks["finished_s"][2] == pytest.approx(second_starts + 0.05)


def test_chunked_prefill_and_decode_share_steps():
    """Budget 40: the second prompt runs as 39 + 39 + 22 tokens beside one decode, 10 ms more a step."""
    run = serve(
        simulation(batching=Chunked(max_num_batched_tokens=40)), session(1, 0.0, (40, 6)), session(2, 0.045, (100, 2))
    )
    assert run.rounds["first_token_s"] == pytest.approx([0.04, 0.05 + 0.1 + 0.03])
    assert gaps_of(run, 0) == [10, 49, 49, 32, 10]
    assert gaps_of(run, 1) == [10]
