import pytest
from support.refusals import refuses

from engines.cost.roofline import A100, B200, GPUS, H20, H100, H200, L40S, RTX4090, gpu, gpu_of_device
from engines.errors import UserError


def test_a_card_has_the_peaks_of_its_datasheet_and_says_so():
    assert (RTX4090.peak_flops, RTX4090.bandwidth) == (165.2e12, 1008e9)
    assert [round(g.peak_flops / g.bandwidth) for g in GPUS] == [164, 419, 153, 295, 206, 281, 37]
    assert all(g.source.startswith("NVIDIA") and g.source.endswith(".") for g in GPUS)


def test_unknown_gpu_lists_the_known_ones():
    assert gpu("L40S") is L40S
    with pytest.raises(UserError, match=r"gpu='v100'.*rtx4090, l40s, a100, h100, h200, b200, h20"):
        gpu("v100")


def test_a_card_of_one_s_own_is_named_by_its_place():
    assert gpu("engines.cost.roofline:L40S") is L40S
    with refuses("gpu='engines.cost.roofline:GB'"):
        gpu("engines.cost.roofline:GB")


def test_a_driver_s_name_is_a_card_only_where_it_is_all_of_that_card():
    named = {
        "NVIDIA GeForce RTX 4090": RTX4090,
        "NVIDIA L40S": L40S,
        "NVIDIA H200": H200,
        "NVIDIA H20": H20,
        "NVIDIA RTX4090": RTX4090,
        "nvidia h200": H200,
        "NVIDIA H100 80GB HBM3": H100,
        "NVIDIA A100-SXM4-80GB": A100,
        "NVIDIA B200": B200,
    }
    assert {name: gpu_of_device(name) for name in named} == named
    for name in (
        "NVIDIA GeForce RTX 4090 D",
        "NVIDIA GeForce RTX 4090 Laptop GPU",
        *("NVIDIA H200 MIG 1g.18gb", "NVIDIA L40", "NVIDIA GH200 480GB", "NVIDIA H20-3e", "NVIDIA H200 NVL"),
        *("NVIDIA H100 NVL", "NVIDIA H100 PCIe", "NVIDIA H100 96GB HBM3"),
        "NVIDIA H100 80GB HBM3 MIG 1g.10gb",
        *("NVIDIA A100-SXM4-40GB", "NVIDIA A100 80GB PCIe", "NVIDIA A800-SXM4-80GB", "NVIDIA GB200"),
        *("NVIDIA GeForce RTX 3090", ""),
    ):
        assert gpu_of_device(name) is None, name
