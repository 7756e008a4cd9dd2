"""What a device reaches in practice: python benchmarks/peaks.py --help"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from common import add_device, device_of

from engines.hardware.peaks import Peaks, measured_peaks

__all__ = ["Peaks", "measured_peaks"]


def main() -> None:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__)
    add_device(parser)
    parser.add_argument("--json", type=Path, help="write what was measured here too")
    options = parser.parse_args()
    device, dtype = device_of(options)
    peaks = measured_peaks(device, dtype)
    print(f"{peaks.flops_per_s / 1e12:.3g} TFLOP/s, {peaks.bytes_per_s / 1e9:.4g} GB/s\n{peaks.how}")
    if options.json is not None:
        facts = {"torch": torch.__version__, "device": options.device, "dtype": str(dtype)}
        options.json.write_text(json.dumps({**facts, "rows": [peaks._asdict()]}, indent=2) + "\n")


if __name__ == "__main__":
    main()
