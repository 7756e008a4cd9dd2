"""``repro calibrate``: fit a card's constants, and compare what they predict with stated numbers."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from engines.cluster.hardware import DEGREES
from engines.cost.kernels import FOLDER, Card, cards, digest_of, encode_tables, load_tables, write_tables
from engines.cost.roofline import Calibration
from engines.errors import UserError, require
from repro.cli import options as opt
from repro.cli.output import print_json, print_table, progress_bar, say
from repro.cli.plots import csv_of
from repro.cli.sweep import check_regular, run_sweep
from repro.families.card_file import card_of
from repro.families.cost import load_calibration, save_calibration
from repro.files import replace_text, writable_file, writable_folder
from repro.reports.claims import Judged, judge_all, load_claims
from repro.reports.figures import DLLM_SERVE
from repro.reports.fitting import medians_sentence, report, write_report

if TYPE_CHECKING:
    from engines.cost.fit import Fit, TimedStep
    from repro.reports.fitting import CardProtocol


@dataclass(frozen=True, kw_only=True)
class CalibrateOptions:
    platform: str = "rtx4090"
    """rtx4090 or l40s; another card, for what gpu-suite fitted on it; or your card's YAML file, with --measured."""
    measured: Path | None = None
    """CSV of steps that you timed on your card (docs/cards.md). Its constants are fitted to them."""
    out: Path | None = None
    """With --measured, the folder for the fitted constants [default: the card file's]."""
    dry_run: bool = False
    """Show the fit without storing it."""
    keep: bool = False
    """Keep the stored constants, and only write the report again."""
    write: bool = False
    """Replace the stored constants and report. Every simulation of the card uses them."""
    silicon: str | None = None
    """Instead, take a card's kernel times from the installed package aiconfigurator-core ('.[silicon]'): l40s, a100, h100, h200 or
    b200."""
    result_dir: Path | None = None
    """Folder of runs [default: results/local]."""

    @property
    def mode(self) -> str:
        """The mode that the options ask for, a key of ``MODES``."""
        from repro.families import platforms
        from repro.reports.fitting import PROTOCOLS

        if self.silicon is not None:
            return "silicon"
        if platforms.CARD_FILE.fullmatch(self.platform) is not None:
            return "file"
        is_fitted_here = self.platform in PROTOCOLS or platforms.platform(self.platform).gpu is None
        return "fit" if is_fitted_here else "suite"

    def check(self) -> None:
        """Refuse options that have no effect together, and refuse to replace files without --write."""
        from repro.paths import CALIBRATION, IS_INSTALLED

        mode = self.mode
        mode_text, effective = MODES[mode]
        for name in ("measured", "out", "dry_run", "keep", "write"):
            value = getattr(self, name)
            option = name if value is True else f"{name}={str(value)!r}"
            fix = "leave it out, or give --platform FILE.yaml" if name in ("measured", "out") else "leave it out"
            require(not value or name in effective, f"{option} has no effect with {mode_text}: {fix}")
        if mode == "file":
            require(
                self.measured is not None,
                f"platform={self.platform!r} is a card of a file: give --measured, a CSV of steps that were timed on it",
            )
            return
        if IS_INSTALLED and not self.dry_run:
            raise UserError(
                "calibrate replaces files that an installed package shares with others: run it in a clone of the repository, or "
                "give --dry-run to see the fit alone"
            )
        if self.dry_run and (self.keep or self.write):
            raise UserError(f"dry_run and {'keep' if self.keep else 'write'}: give one of them")
        replaced = f"{FOLDER / self.silicon}.csv.gz" if self.silicon else f"{CALIBRATION / self.platform}.json"
        require(
            self.dry_run or self.keep or self.write,
            f"calibrate replaces {replaced}, which simulations rest on: add --write, or --dry-run to see it alone",
        )


MODES = {
    "silicon": ("silicon, which takes kernel times alone", ("dry_run", "write")),
    "file": ("a card of a file", ("measured", "out", "dry_run")),
    "suite": ("a card that gpu-suite fits", ("dry_run", "write")),
    "fit": ("a card that is fitted to stated numbers", ("dry_run", "keep", "write")),
}
"""Mode -> its name in a refusal, and the options that have an effect in it."""


def calibrate(*, options: CalibrateOptions, json: opt.Json = False) -> None:
    """Fit a card's constants on its named cells, and compare every stated number with our prediction. Runs what is missing."""
    from repro.paths import CALIBRATION, LOCAL, RESULTS
    from repro.reports.fitting import protocol_of

    options.check()
    card, mode = options.platform, options.mode
    if options.silicon is not None:
        _extract(options.silicon, write=options.write, json=json)
        return
    if mode == "file":
        assert options.measured is not None, "it is checked"
        _calibrate_card(Path(card), options.measured, options.out, dry_run=options.dry_run, json=json)
        return
    if mode == "suite":
        _adopt(card, options.result_dir or RESULTS / card, write=options.write, json=json)
        return
    protocol = protocol_of(card)
    if options.dry_run:
        calibration = _fit(protocol)
        result = report(calibration, [])
    else:
        writable_folder("calibration", CALIBRATION)
        calibration = Calibration.load(CALIBRATION / f"{card}.json") if options.keep else _fit(protocol)
        save_calibration(calibration, CALIBRATION / f"{card}.json")
        load_calibration.cache_clear()
        result = report(calibration, _judged_claims(card, options.result_dir or LOCAL))
        write_report(result)
    if json:
        print_json(result)
        return
    say(f"{card}: matmul = attention share of peak {calibration.matmul_efficiency:.4f}; {calibration.note}")
    say(f"fitted on {'; '.join(calibration.fitted_on)}")
    if not options.dry_run:
        _print_comparisons(result)


def _extract(card: str, *, write: bool, json: bool) -> None:
    """Take a card's kernel times from the package, and print what our rules changed: for block-diffusion models, and for all others."""
    from engines.cost.extract import extracts

    tables = extracts(card, DEGREES)
    contents = {folder: encode_tables(table.about, table.curves) for folder, table in tables.items()}
    is_same = all(
        card in cards(folder) and digest_of(content) == load_tables(card, folder).digest
        for folder, content in contents.items()
    )
    if write:
        for folder, content in contents.items():
            writable_folder("silicon", folder)
            write_tables(folder / f"{card}.csv.gz", content)
    main, num_curves = tables[FOLDER], sum(len(group) for table in tables.values() for group in table.curves.values())
    if json:
        print_json({**main.about, "curves": num_curves, "is_same": is_same})
        return
    names = {name: None for rules in main.rules.values() for name in rules}
    print_table(
        f"{card}: kernel times of {main.about['package']} {main.about['version']}, and what the rules changed",
        ("", *main.rules),
        [(name.replace("_", " "), *(f"{rules[name]:,}" for rules in main.rules.values())) for name in names],
    )
    say(f"{num_curves} curves; {'as committed' if is_same else 'not those that are committed'}")


def _print_comparisons(result: Mapping[str, Any]) -> None:
    print_table(
        "Stated numbers and what the calibration gives",
        ("claim", "what", "stated", "ours", "error", "role", "verdict"),
        [
            (
                row["claim"],
                row["what"],
                _number_text(row["expected"]),
                _number_text(row["ours"]),
                "-" if row["error_percent"] is None else f"{row['error_percent']:+.1f} %",
                row["role"],
                row["verdict"],
            )
            for row in result["comparisons"]
        ],
    )
    say(f"median absolute error of predictions: {medians_sentence(result['medians'])}")


def _adopt(card: str, folder: Path, *, write: bool, json: bool) -> None:
    """Adopt the constants that a GPU suite fitted on its own card."""
    from repro.gpu_suite.calibration import read_fit
    from repro.paths import CALIBRATION

    fit = read_fit(folder, card)
    calibration = Calibration.from_dict(fit["calibration"])
    if write:
        writable_folder("calibration", CALIBRATION)
        save_calibration(calibration, CALIBRATION / f"{card}.json")
        load_calibration.cache_clear()
        write_report(fit)
    if json:
        print_json(fit)
        return
    say(
        f"{card}: matmul = attention share of peak {calibration.matmul_efficiency:.4f}, "
        f"{1e3 * calibration.step_overhead_s:.2f} ms a step; {calibration.note}"
    )
    say(f"fitted on {'; '.join(calibration.fitted_on)}; {fit['machine']}, commit {fit['commit']}")
    say(f"median absolute error of predictions: {medians_sentence(fit['medians'])}")


def _fit(protocol: "CardProtocol") -> Any:
    from repro.reports.fitting import fit

    with progress_bar(f"fitting {protocol.card}, runs:") as advance:
        return fit(protocol, on_run=advance)


def _judged_claims(platform: str, result_dir: Path) -> list[Judged]:
    """Judge every simulated comparison with the paper on this card. Missing runs are made first."""
    from repro.reports.evidence import findings_of, sources, sweep_over
    from repro.reports.fitting import FITTED
    from repro.runs.store import Store

    selected = sources(DLLM_SERVE.entries, (platform,), charged=FITTED)
    sweep = sweep_over(selected, Store(result_dir))
    run_sweep(sweep)
    simulated = [finding for finding in findings_of(selected, sweep) if finding.obtained == "simulated"]
    return [result for result in judge_all(load_claims(DLLM_SERVE.name), simulated) if result.finding is not None]


def _number_text(value: float | tuple[float, ...] | None) -> str:
    if isinstance(value, tuple):
        return " to ".join(f"{v:.4g}" for v in value)
    return "-" if value is None else f"{value:.4g}"


# -- a card of a user's own ------------------------------------------------------------------------------


def _calibrate_card(path: Path, measured: Path, out: Path | None, *, dry_run: bool, json: bool) -> None:
    """Fit the constants, report the error of each step, and store both beside the card's file, or in ``out``."""
    from engines.cost.fit import fit_steps
    from repro.families.dllm.replay import read_steps

    card, model = card_of(path)
    check_regular("measured", measured)
    steps = read_steps(measured, model)
    folder = path.parent if out is None else out
    files = []
    if not dry_run:
        writable_folder("out", folder)
        files = [folder / f"{path.stem}.calibration.json", folder / f"{path.stem}.residuals.csv"]
    for file in files:
        writable_file("out", file, measured, path)
    fit = fit_steps(steps, card, measured.name)
    fitted = fit.calibration
    rows = _card_rows(steps, card, fitted, fit.left_out)
    if files:
        save_calibration(fitted, files[0])
        replace_text(files[1], csv_of(rows))
    errors = {name: _errors(rows, name) for name in ("error_percent", "left_out_error_percent")}
    if json:
        print_json(
            {
                "card": card.name,
                "obtained": "fitted",
                "calibration": asdict(fitted),
                "untold": list(fit.datasheet_shares),
                "residuals": errors["error_percent"],
                "leave_one_out": errors["left_out_error_percent"],
                "rows": rows,
                "files": [str(file) for file in files],
            }
        )
        return
    print_table(
        f"{card.name}: constants fitted to {len(steps)} steps of {measured.name}",
        ("what", "value"),
        [
            ("matmul = attention share of peak", _share_text(fitted.matmul_efficiency, "arithmetic", fit)),
            ("share of bandwidth", _share_text(fitted.bandwidth_efficiency, "memory", fit)),
            ("overhead of a step", f"{1e3 * fitted.step_overhead_s:.4g} ms"),
            *(
                (f"of {text} besides", f"{1e3 * getattr(fitted, n):.4g} ms")
                for n, text in KINDS.items()
                if n in fit.free.kinds
            ),
            ("residuals, absolute", _error_text(errors["error_percent"])),
            ("leave-one-out error, absolute", _error_text(errors["left_out_error_percent"])),
        ],
    )
    if files:
        say(f"files: {', '.join(map(str, files))}")
        say(f"runs rest on it once {path.name} says 'calibration: {files[0].name if out is None else files[0]}'")


KINDS = {"layout_s": "one whose rows lie otherwise than the last one's", "build_s": "one that builds a cache"}


def _share_text(share: float, bound: str, fit: "Fit") -> str:
    return "1, the datasheet's: the steps do not tell it" if bound in fit.datasheet_shares else f"{share:.4f}"


def _card_rows(
    steps: "Sequence[TimedStep]", card: Card, fitted: Calibration, left_out: Sequence[float | None]
) -> list[dict[str, Any]]:
    def error(seconds: float | None, measured: float) -> float | None:
        return None if seconds is None else 100 * (seconds / measured - 1)

    rows = []
    for step, other in zip(steps, left_out, strict=True):
        predicted_s = step.predicted_s(card, fitted)
        rows.append(
            {
                "name": step.name,
                "model": step.shape.name,
                "measured_s": step.seconds,
                "fitted_s": predicted_s,
                "error_percent": error(predicted_s, step.seconds),
                "left_out_s": other,
                "left_out_error_percent": error(other, step.seconds),
            }
        )
    return rows


def _errors(rows: Sequence[Mapping[str, Any]], name: str) -> dict[str, float | int | None]:
    errors = [abs(row[name]) for row in rows if row[name] is not None]
    return {
        "median_percent": median(errors) if errors else None,
        "worst_percent": max(errors, default=None),
        "not_told": len(rows) - len(errors),
    }


def _error_text(errors: Mapping[str, float | int | None]) -> str:
    if errors["median_percent"] is None:
        return "not told: each step is needed"
    text = f"median {errors['median_percent']:.2f} %, worst {errors['worst_percent']:.2f} %"
    return text if not errors["not_told"] else f"{text}, {errors['not_told']} steps the others do not tell"
