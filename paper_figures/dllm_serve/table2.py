"""dLLM-Serve Table 2 (§6.1): the paper's machines beside this project's hardware catalogue."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from engines.hardware.catalogue import GB, gpu
from engines.models.checkpoint import config_of
from engines.models.shape import ModelShape
from paper_figures.common.table import save_table
from repro.reports.claims import Finding
from repro.reports.figures import Rendered, View
from repro.reports.paper import load_table
from repro.runs.cell import Cell
from repro.runs.store import StoredRun
from repro.systems.calibration import describe_calibration, load_calibration
from repro.systems.dllm.part import DllmPart
from repro.systems.platforms import platform as platform_of

NAME = "table2"
TITLE = "dLLM-Serve Table 2: hardware settings"
SOURCE = "dLLM-Serve (arXiv:2512.17077), Table 2, §6.1"
PLATFORMS = ("rtx4090",)
DECIDES_ON: tuple[str, ...] = ()

COLUMNS = (
    "GPU (paper)",
    "CPU (paper)",
    "RAM GB (paper)",
    "memory GB",
    "weights GB",
    "left GB",
    "left (paper)",
    "BF16 TFLOP/s",
    "GB/s",
    "simulated as",
)


def cells(view: View) -> list[Cell]:
    return []


def render(runs: Sequence[StoredRun], view: View, out: Path) -> Rendered:
    rows = []
    for row in load_table("dllm_serve/table2.csv"):
        where = platform_of(str(row["platform"]))
        assert where.gpu is not None
        card, shape = (
            gpu(where.gpu),
            ModelShape.from_config(config_of(where.part(DllmPart).model), name=where.part(DllmPart).model),
        )
        rows.append(
            (
                str(row["gpu"]),
                f"{row['cpu']} x {row['cpu_sockets']}",
                str(row["ram_gb"]),
                f"{card.memory_bytes / GB:g}",
                f"{shape.weight_bytes / GB:.2f}",
                f"{(card.memory_bytes - shape.weight_bytes) / GB:.2f}",
                str(row["headroom_after_weights_gb_from_text"]),
                f"{card.bf16_tflops:g}",
                f"{card.memory_bandwidth_gb_s:g}",
                describe_calibration(load_calibration(where.gpu)),
            )
        )
    notes = [
        "Columns marked (paper) are printed there; peaks are vendor data sheets', weights are computed from the model's shape."
    ]
    stem = f"{NAME}-{view.stem}"
    return save_table(out, stem, title=TITLE, columns=COLUMNS, rows=rows, notes=notes)


def findings(runs: Sequence[StoredRun], view: View) -> list[Finding]:
    """Its statements about memory are decided by Figure 2."""
    return []
