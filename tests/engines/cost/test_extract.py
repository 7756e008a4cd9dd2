"""What is done to measured times: spikes go, steps and full tiles stay, and nothing streams faster than memory."""

import numpy as np
import pytest

from engines.cost.extract import SPIKE, filled, spikes, streamed

ROWS = np.array([1.0, 2.0, 4.0, 8.0, 16.0, 256.0, 257.0, 512.0])


def test_a_planted_spike_is_found_and_put_on_the_line_between_its_neighbours():
    times = np.array([[1.0, 1.0, 20.0, 1.2, 1.2, 2.0, 3.0, 3.1]])
    gone = spikes(times)
    assert gone.tolist() == [[False, False, True, False, False, False, False, False]]
    assert filled(ROWS, times, gone)[0, 2] == pytest.approx(1.0 + 0.2 * (4 - 2) / (8 - 2))


@pytest.mark.parametrize(
    "times",
    [
        [1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 2.0, 2.0],  # the tile behind a full one
        [1.0, 1.0, 1.0, 1.4, 1.6, 1.0, 1.7, 1.8],  # a full tile
        [9.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 9.0],  # ends have one neighbour
        [1.0, 1.0, SPIKE, 1.0, 1.0, 1.0, 1.0, 1.0],  # noise
    ],
    ids=["tile step", "full tile", "ends", "noise"],
)
def test_what_a_card_may_do_stays(times):
    assert not spikes(np.array([times])).any()


def test_a_product_out_of_the_cache_is_raised_to_what_large_products_stream_at():
    """Ten bytes a second by the datasheet, of which the large product reaches eight; the small one seems to move forty."""
    rows, weights = np.array([1.0, 8.0, 64.0]), np.array([100.0, 8000.0])
    num_bytes = weights[:, None] + np.zeros(3)
    times = np.array([[100 / 40, 100 / 40, 100.0], [1000.0, 1000.0, 1000.0]])
    found = streamed(times, num_bytes, rows, weights, bandwidth=10.0, cache=1000.0)
    assert found.bandwidth == pytest.approx(8.0)
    assert found.times.tolist() == [[12.5, 12.5, 100.0], [1000.0, 1000.0, 1000.0]]
    assert found.impossible.tolist() == [[True, True, False], [False, False, False]]
    assert found.raised.tolist() == [[True, True, False], [False, False, False]]


def test_memory_is_never_taken_to_be_faster_than_its_datasheet():
    found = streamed(
        np.array([[1.0, 1.0]]),
        np.array([[100.0, 100.0]]),
        np.array([1.0, 2.0]),
        np.array([100.0]),
        bandwidth=10.0,
        cache=1.0,
    )
    assert found.bandwidth == 10.0
    assert found.times.tolist() == [[10.0, 10.0]]
