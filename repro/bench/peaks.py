"""What a device reaches in practice: python -m repro.bench.peaks --help"""

from engines.cost.peaks import measured_peaks
from repro.bench.common import Rows, add_device, device_of, facts_of, parser_of, run


def main() -> None:
    parser = parser_of(__doc__)
    add_device(parser)
    options = parser.parse_args()
    device, dtype = device_of(options)
    peaks = measured_peaks(device, dtype)
    print(f"{peaks.flops_per_s / 1e12:.3g} TFLOP/s, {peaks.bytes_per_s / 1e9:.4g} GB/s\n{peaks.how}")
    Rows(options.json, facts_of(device, dtype)).add(peaks._asdict())


if __name__ == "__main__":
    run(main)
