"""Where data is read and results go: in a checkout below it; of an installed package, its own data, and the working
directory."""

from pathlib import Path

REPO = Path(__file__).resolve().parents[1]
_PACKAGED = Path(__file__).resolve().parent / "data"
"""What a wheel brings of the folders below (setup.py)."""
IS_INSTALLED = _PACKAGED.is_dir()

_DATA = _PACKAGED if IS_INSTALLED else REPO
DATASETS = _DATA / "datasets"
COMMITTED = _DATA / "results"
PAPER = COMMITTED / "paper"
CALIBRATION = COMMITTED / "calibration"
ACCURACY = COMMITTED / "cpu-tiny" / "accuracy-cpu-tiny.csv"
"""What every compared configuration solves; figures at equal accuracy choose by it."""

RESULTS = Path("results") if IS_INSTALLED else REPO / "results"
LOCAL = RESULTS / "local"
LOCAL_FIGURES = RESULTS / "figures"


def figures_beside(result_dir: Path | None) -> Path:
    """Where figures of the runs in a folder go, of the default one where it is None."""
    return LOCAL_FIGURES if result_dir is None else result_dir / "figures"
