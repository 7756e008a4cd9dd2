"""What a device reaches in practice: python benchmarks/peaks.py --help"""

from __future__ import annotations

import argparse

import torch

from engines.models.loader import check_device, parse_dtype
from engines.peaks import Peaks, measured_peaks

__all__ = ["Peaks", "measured_peaks"]


def main() -> None:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", help="float32, float16 or bfloat16 [default: bfloat16 on CUDA, float32 on the CPU]")
    options = parser.parse_args()
    check_device(options.device)
    device = torch.device(options.device)
    peaks = measured_peaks(device, parse_dtype(options.dtype or ("float32" if device.type == "cpu" else "bfloat16")))
    print(f"{peaks.flops_per_s / 1e12:.3g} TFLOP/s, {peaks.bytes_per_s / 1e9:.4g} GB/s\n{peaks.how}")


if __name__ == "__main__":
    main()
