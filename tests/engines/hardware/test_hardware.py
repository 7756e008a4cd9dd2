from __future__ import annotations

import pytest

from engines.errors import UserError
from engines.hardware.catalogue import GPUS, H20, H200, L40S, RTX4090, gpu, gpu_of_device


def test_peaks_are_the_datasheets():
    rows = [(g.name, g.bf16_tflops, g.memory_bandwidth_gb_s, g.memory_bytes) for g in GPUS]
    assert rows == [
        ("rtx4090", 165.2, 1008, 24_000_000_000),
        ("l40s", 362.05, 864, 48_000_000_000),
        ("h200", 989.5, 4800, 141_000_000_000),
        ("h20", 148, 4000, 96_000_000_000),
    ]
    assert all(g.source.startswith("NVIDIA") and g.source.endswith(".") for g in GPUS)


def test_ridge_points():
    assert [round(g.ridge_flop_per_byte) for g in (RTX4090, L40S, H200, H20)] == [164, 419, 206, 37]
    assert RTX4090.peak_flops == 165.2e12
    assert RTX4090.bandwidth == 1008e9


def test_unknown_gpu_lists_the_known_ones():
    assert gpu("L40S") is L40S
    with pytest.raises(UserError, match=r"gpu='a100'.*rtx4090, l40s, h200, h20"):
        gpu("a100")


def test_a_driver_s_name_is_a_card_only_where_it_is_all_of_that_card():
    named = {
        "NVIDIA GeForce RTX 4090": RTX4090,
        "NVIDIA L40S": L40S,
        "NVIDIA H200": H200,
        "NVIDIA H20": H20,
        "NVIDIA RTX4090": RTX4090,
        "nvidia h200 nvl": H200,
    }
    assert {name: gpu_of_device(name) for name in named} == named
    for name in (
        "NVIDIA GeForce RTX 4090 D",
        "NVIDIA GeForce RTX 4090 Laptop GPU",
        "NVIDIA H200 MIG 1g.18gb",
        "NVIDIA L40",
        "NVIDIA GH200 480GB",
        "NVIDIA H20-3e",
        "NVIDIA A100-SXM4-80GB",
        "NVIDIA GeForce RTX 3090",
        "",
    ):
        assert gpu_of_device(name) is None, name
