"""What a device reaches in practice: python benchmarks/peaks.py --help"""

from __future__ import annotations

import argparse

from common import add_device, device_of

from engines.hardware.peaks import Peaks, measured_peaks

__all__ = ["Peaks", "measured_peaks"]


def main() -> None:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__)
    add_device(parser)
    options = parser.parse_args()
    peaks = measured_peaks(*device_of(options))
    print(f"{peaks.flops_per_s / 1e12:.3g} TFLOP/s, {peaks.bytes_per_s / 1e9:.4g} GB/s\n{peaks.how}")


if __name__ == "__main__":
    main()
