"""Sessions whose K/V a decode worker holds."""

import numpy as np

from engines.ampd.live.decode import Residents
from engines.ar.torch.executor import TorchExecutor
from engines.models.loader import load_causal
from engines.models.qwen2_config import tiny_causal


def test_a_session_that_is_back_under_another_epoch_outlives_who_it_was():
    """Between a worker's question which sessions it has lost and its dropping them, one may have come back."""
    model = load_causal(tiny_causal(d_model=32, n_layers=1), weights="random", seed=0)
    executor = TorchExecutor(model, num_slots=2, max_len=64, num_tokens=128)
    residents = Residents(executor)
    before = residents.known(5, "0", 0)
    assert residents.place(before, 9)
    back = residents.known(5, "1", 0)
    assert executor.tables.num_free_slots == 2
    assert residents.place(back, 9)
    residents.drop(before)
    assert residents.is_known(back)
    assert not residents.is_known(before)
    assert residents.grow(np.array([back.slot]), np.array([20]))
    residents.drop(back)
    assert (executor.tables.num_free_slots, residents.kv_tokens, residents.held()) == (2, 0, [])
