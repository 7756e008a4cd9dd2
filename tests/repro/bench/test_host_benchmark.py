"""The host benchmark counts what a forward launches."""

import pytest
import torch

from repro.bench.common import table
from repro.bench.host import NARROW, Launches, launch_rows, launches, time_steps


def test_a_view_is_no_launch_and_a_kernel_is_one():
    counter, x = Launches(), torch.ones(3, 4)
    double = counter.as_one_launch("double", lambda x: (x + x) * 1)
    with counter:
        double(x.view(4, 3).transpose(0, 1)[1:])
        torch.empty(5)
        x.add_(1)
    assert counter.names == ["double", "aten::add_.Tensor"]


@pytest.mark.parametrize(("has_refresh", "most"), [(False, 10), (True, 12)])
def test_a_layer_launches_few_kernels(has_refresh, most):
    one, two = (launches(n, has_refresh=has_refresh, fused=True) for n in (1, 2))
    assert two.number - one.number == most
    assert two.names.count("attention") == 2 * (1 + has_refresh)
    assert two.names.count("aten::mm") == 2 * 4
    assert two.names.count("rms_norm") == 2 * 2 + 1
    assert two.names.count("store") == two.names.count("rotate") == two.names.count("swiglu") == 2


def test_launches_of_all_layers():
    found = launch_rows()
    assert [one["name"] for one in found] == [
        f"{kind}, {how}" for kind in ("reuse", "mixed") for how in ("operator by operator", "fused")
    ]
    assert found[1]["whole"] == launches(32, has_refresh=False, fused=True).number
    assert all(f"{one['whole']}" in table(found) for one in found)


def test_steps_of_nothing_are_served():
    row = time_steps(3, 48, blocks=1)
    assert (row["requests"], row["steps"]) == (3, 30)
    assert NARROW.n_layers == 32
