"""dLLM-Serve Table 2: hardware settings."""

from collections.abc import Mapping

from engines.cost.roofline import GB, gpu
from paper_figures.common.figure import Page, Table
from paper_figures.common.runs import Runs
from paper_figures.dllm_serve.layout import PAPER, dllm_figure, shape_of
from repro.families.cost import describe_calibration, load_calibration
from repro.families.platforms import platform as platform_of
from repro.reports.claims import TableValue, load_table

COLUMNS = (
    *("GPU (paper)", "CPU (paper)", "RAM GB (paper)", "memory GB", "weights GB"),
    *("left GB", "left (paper)", "BF16 TFLOP/s", "GB/s", "simulated as"),
)


def row_of(printed: Mapping[str, TableValue]) -> tuple[str, ...]:
    platform = platform_of(str(printed["platform"]))
    assert platform.gpu is not None
    card, weights = gpu(platform.gpu), shape_of(platform).weight_bytes
    return (
        str(printed["gpu"]),
        f"{printed['cpu']} x {printed['cpu_sockets']}",
        str(printed["ram_gb"]),
        f"{card.memory_bytes / GB:g}",
        f"{weights / GB:.2f}",
        f"{(card.memory_bytes - weights) / GB:.2f}",
        str(printed["headroom_after_weights_gb_from_text"]),
        f"{card.bf16_tflops:g}",
        f"{card.memory_bandwidth_gb_s:g}",
        describe_calibration(load_calibration(platform.gpu)),
    )


def page(runs: Runs) -> Page:
    note = "Columns marked (paper) are printed there; peaks are vendor data sheets', weights are computed from the model's shape."
    rows = list(map(row_of, load_table("dllm_serve/table2.csv")))
    return Page(table=Table(columns=COLUMNS, rows=rows), notes=[note])


FIGURE = dllm_figure("table2", f"{PAPER}, Table 2, §6.1", platforms=("rtx4090",), page=page, decides_on=())
"""Figure 2 decides its statements about memory."""
