"""Catalogue of GPUs: vendor peaks, memory and links, each with its source.

Memory sizes are read in decimal: "24 GB" is 24e9 bytes, bandwidth likewise. A card reports up to
7 % more than that (an RTX 4090 has 24 GiB on board) or slightly less (ECC of the L40S takes its
share); driver and context take some back. A memory plan adds its own guard band on top.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from itertools import pairwise

from engines.errors import require
from engines.named import load_named, where_of

GB = 10**9


@dataclass(frozen=True, kw_only=True)
class Gpu:
    name: str
    bf16_tflops: float
    """Dense BF16 matrix peak with float32 accumulation, no structured sparsity."""
    memory_bandwidth_gb_s: float
    memory_bytes: int
    nvlink_gb_s: float | None
    """Per GPU, both directions together (as vendors print it); None where there is no NVLink."""
    pcie_gb_s: float
    """x16 slot, both directions together."""
    source: str

    peak_flops: float = field(init=False, repr=False, compare=False)
    """FLOP per second."""
    bandwidth: float = field(init=False, repr=False, compare=False)
    """Bytes per second."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "peak_flops", self.bf16_tflops * 1e12)
        object.__setattr__(self, "bandwidth", self.memory_bandwidth_gb_s * 1e9)

    def __str__(self) -> str:
        return self.name


RTX4090 = Gpu(
    name="rtx4090",
    bf16_tflops=165.2,
    memory_bandwidth_gb_s=1008,
    memory_bytes=24 * GB,
    nvlink_gb_s=None,
    pcie_gb_s=64,
    source="NVIDIA Ada GPU Architecture whitepaper, GeForce RTX 4090: BF16 tensor peak with FP32 accumulation, dense; "
    "24 GB GDDR6X, PCIe Gen4 x16.",
)
L40S = Gpu(
    name="l40s",
    bf16_tflops=362.05,
    memory_bandwidth_gb_s=864,
    memory_bytes=48 * GB,
    nvlink_gb_s=None,
    pcie_gb_s=64,
    source="NVIDIA L40S datasheet: BFLOAT16 Tensor Core 362.05 TFLOPS dense (733 with sparsity), 48 GB GDDR6 with ECC, "
    "864 GB/s, PCIe Gen4 x16 64 GB/s bidirectional.",
)
H200 = Gpu(
    name="h200",
    bf16_tflops=989.5,
    memory_bandwidth_gb_s=4800,
    memory_bytes=141 * GB,
    nvlink_gb_s=900,
    pcie_gb_s=128,
    source="NVIDIA H200 SXM datasheet: BFLOAT16 Tensor Core 1,979 TFLOPS with sparsity, half of it dense; 141 GB HBM3e, "
    "4.8 TB/s, NVLink 900 GB/s, PCIe Gen5 128 GB/s.",
)
H100 = Gpu(
    name="h100",
    bf16_tflops=989.5,
    memory_bandwidth_gb_s=3350,
    memory_bytes=80 * GB,
    nvlink_gb_s=900,
    pcie_gb_s=128,
    source="NVIDIA H100 SXM datasheet: BFLOAT16 Tensor Core 1,979 TFLOPS with sparsity, half of it dense; 80 GB HBM3, "
    "3.35 TB/s, NVLink 900 GB/s, PCIe Gen5 128 GB/s.",
)
A100 = Gpu(
    name="a100",
    bf16_tflops=312,
    memory_bandwidth_gb_s=2039,
    memory_bytes=80 * GB,
    nvlink_gb_s=600,
    pcie_gb_s=64,
    source="NVIDIA A100 80GB SXM datasheet: BFLOAT16 Tensor Core 312 TFLOPS dense, 80 GB HBM2e, 2,039 GB/s, NVLink "
    "600 GB/s, PCIe Gen4 64 GB/s.",
)
B200 = Gpu(
    name="b200",
    bf16_tflops=2250,
    memory_bandwidth_gb_s=8000,
    memory_bytes=180 * GB,
    nvlink_gb_s=1800,
    pcie_gb_s=128,
    source="NVIDIA HGX B200 datasheet, an eighth of its eight GPUs: BF16 Tensor Core 36 PFLOPS with sparsity, half of it "
    "dense; 1.4 TB HBM3e, 62 to 64 TB/s, NVLink 14.4 TB/s, PCIe Gen5 x16.",
)
H20 = Gpu(
    name="h20",
    bf16_tflops=148,
    memory_bandwidth_gb_s=4000,
    memory_bytes=96 * GB,
    nvlink_gb_s=900,
    pcie_gb_s=128,
    source="NVIDIA H20 SXM specifications as reported by system vendors (no public datasheet): BF16 148 TFLOPS dense, "
    "96 GB HBM3, 4.0 TB/s, NVLink 900 GB/s, PCIe Gen5 x16.",
)

GPUS: tuple[Gpu, ...] = (RTX4090, L40S, A100, H100, H200, B200, H20)


def gpu(name: str | Gpu) -> Gpu:
    """Look a GPU up by its name, ignoring case; or any other as ``module:NAME`` or by an installed package's name. One that is given is itself."""
    if isinstance(name, Gpu):
        return name
    for known in GPUS:
        if known.name == name.lower():
            return known
    found = load_named("gpu", where_of("gpu", name, [known.name for known in GPUS]))
    require(isinstance(found, Gpu), f"gpu={name!r} is no engines.cost.cards.Gpu: name one")
    own: Gpu = found
    return own


_OTHER_CARDS = {"d", "3e", "laptop", "mobile", "mig", "nvl", "pcie"}
"""What a driver adds to the name of a card with other peaks, or of a part of one."""
_SAID_MEMORY = re.compile(r"(\d+)gb")


def gpu_of_device(device_name: str) -> Gpu | None:
    """The card a driver calls ``device_name`` ("NVIDIA H100 80GB HBM3"); None where it is not in the catalogue, or is
    sold under the same name with other peaks or another memory."""
    words = re.findall(r"[a-z0-9]+", device_name.lower())
    names = {*words, *(first + second for first, second in pairwise(words))}
    if names & _OTHER_CARDS:
        return None
    said = {int(found[1]) * GB for word in words if (found := _SAID_MEMORY.fullmatch(word))}
    return next((known for known in GPUS if known.name in names and said <= {known.memory_bytes}), None)
