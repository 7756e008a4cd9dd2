"""Checks as runs: tests, goldens, agreement and benchmarks go through the store like any cell. They can resume, and record their code and
where they were made."""

import copy
import os
import subprocess
import sys
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, ClassVar

from engines.dllm.plan import Request
from engines.errors import UserError
from repro.families.platforms import DllmPart, platform
from repro.paths import REPO
from repro.runs.cell import Cell
from repro.runs.family import Family, Metric
from repro.runs.record import REQUEST_COLUMNS, REQUESTS, Obtained, OnProgress, RunRecord, empty_table
from repro.runs.statistics import wilson_interval

if TYPE_CHECKING:
    from torch import Tensor

    from engines.models.loader import Weights
    from engines.models.protocol import DiffusionModel


def load_pair(model: str, *, weights: "Weights", device: str) -> "tuple[DiffusionModel, DiffusionModel]":
    """The model in (float32, bfloat16). A checkpoint is loaded in both, so rounding its weights counts. Random weights are drawn in
    bfloat16 and widened, like published 16-bit checkpoints, so only the arithmetic differs."""
    import torch

    from engines.models.loader import load_model

    rounded = load_model(model, dtype=torch.bfloat16, device=device, weights=weights)
    if weights == "random":
        exact: Any = copy.deepcopy(rounded)
        return exact.to(torch.float32), rounded
    return load_model(model, dtype=torch.float32, device=device, weights=weights), rounded


def top1_agreement(exact: "DiffusionModel", rounded: "DiffusionModel", requests: Sequence[Request]) -> dict[str, Any]:
    """Share of masked positions where both pick the same token, with one forward per prompt. Each prompt is followed by its whole generated
    region, all masked. Uses raw argmax; the lowest id wins ties. ``median_margin`` is the median lead of float32's best logit over its
    second."""
    import torch

    num_positions = agreeing = 0
    margins = []
    with torch.inference_mode():
        for request in requests:
            exact_logits, rounded_logits = (_masked_logits(model, request) for model in (exact, rounded))
            num_positions += request.generation.gen_length
            agreeing += int((exact_logits.argmax(dim=-1) == rounded_logits.argmax(dim=-1)).sum())
            best = exact_logits.topk(2, dim=-1).values
            margins.append((best[:, 0] - best[:, 1]).float().cpu())
    low, high = wilson_interval(agreeing, num_positions)
    return {
        "num_prompts": len(requests),
        "n": num_positions,
        "agreeing": agreeing,
        "share": agreeing / num_positions,
        "low": low,
        "high": high,
        "median_margin": float(torch.cat(margins).median()),
    }


def _masked_logits(model: "DiffusionModel", request: Request) -> "Tensor":
    """[gen_length, V] Logits of the positions to generate."""
    import torch

    device = next(model.parameters()).device
    config, length = model.config, request.generation.gen_length
    assert request.prompt_ids is not None
    ids = torch.tensor([*request.prompt_ids, *[config.mask_token_id] * length], dtype=torch.int64, device=device)
    hidden = model.hidden(ids, model.rotary(torch.arange(len(ids), device=device)), _attend)
    # If row i predicts token i + 1, take the rows one position earlier.
    start = request.prompt_len - int(config.shifts_logits)
    return model.logits(hidden[start : start + length])


def _attend(layer: int, q: "Tensor", k: "Tensor", v: "Tensor") -> "Tensor":
    """Every row attends to every row."""
    from engines.attention.backends import sdpa

    return sdpa(q[None], k[None], v[None])[0]


Facts = Mapping[str, Any]


def _failures(record: RunRecord) -> Iterator[str]:
    if (reason := record.facts["failed"]) is not None:
        yield reason


CHECK = Family(
    name="check",
    serves=False,
    metrics=(Metric("note", "-", "what it found, in a clause", "never", lambda record: record.facts["note"]),),
    checks=(_failures,),
)


NO_REQUESTS = SimpleNamespace(provenance=SimpleNamespace(checksum=""))
"""The empty workload of a check."""


@dataclass(frozen=True, kw_only=True)
class Check(ABC):
    """One configured check. ``look`` returns facts: ``note``, and ``failed`` if it found a fault."""

    code: ClassVar[tuple[str, ...]] = ("repro.families.dllm.on_torch",)
    device: str
    limit_s: float = 3600.0
    """A check in its own process is ended after this time."""
    obtained: ClassVar[Obtained] = "measured"
    basis: ClassVar[str] = ""
    is_apart: ClassVar[bool] = False
    """Whether it runs in its own process, so that a failure there does not cost this process its device."""

    @property
    def modules(self) -> tuple[str, ...]:
        return type(self).__module__, *self.code

    def check_machine(self) -> None:
        from engines.models.loader import check_device

        check_device(self.device)

    def run(self, workload: SimpleNamespace, on_progress: OnProgress | None = None) -> RunRecord:
        from repro.families.dllm.on_torch import release

        # Free the device's memory for another process, or for a larger model.
        release(self.device)
        facts = {"failed": None, **self.look()}
        return RunRecord(
            tables={REQUESTS: empty_table(REQUEST_COLUMNS)},
            manifest={"obtained": self.obtained, "device": self.device, "facts": facts},
        )

    @abstractmethod
    def look(self) -> Facts: ...


@dataclass(frozen=True)
class CheckSystem:
    """A check as a system. The cell's knobs are the check's fields."""

    name: str
    check: type[Check]
    family: ClassVar[Family] = CHECK

    @property
    def title(self) -> str:
        return self.name

    def prepare(self, cell: Cell) -> tuple[Check, SimpleNamespace]:
        knobs = {name: value for name, value in cell.knobs if name != "basis"}
        try:
            return self.check(device=platform(cell.platform).part(DllmPart).device, **knobs), NO_REQUESTS  # type: ignore[arg-type]
        except TypeError as error:
            raise UserError(f"check {self.name!r}: {error}") from None


@dataclass(frozen=True, kw_only=True)
class GpuTests(Check):
    """Runs the tests marked gpu in their own process."""

    is_apart = True
    paths: str = "tests"
    """One or more, separated by blanks."""

    def look(self) -> Facts:
        done = _run_command(
            [sys.executable, "-m", "pytest", "-m", "gpu", "-p", "no:cacheprovider", *self.paths.split()], self.limit_s
        )
        facts = {"returncode": done.returncode, "output": done.stdout[-4000:], "note": _last_line(done)}
        if done.returncode == 5:
            return {**facts, "note": "no test is marked gpu"}
        return {**facts, "failed": _last_line(done) if done.returncode else None}


@dataclass(frozen=True, kw_only=True)
class Goldens(Check):
    """Replays golden cases in float32 on the device, token by token."""

    code = ("repro.families.dllm.on_torch", "repro.checks.goldens")
    per_method: int = 0
    """Cases of each method; 0 means all."""

    def look(self) -> Facts:
        from repro.checks.goldens import GOLDEN_DIR, METHODS, read_cases, verify

        cases = [case for case in read_cases(GOLDEN_DIR) if case.required]
        selected = [
            case for name in METHODS for case in [c for c in cases if c.method == name][: self.per_method or None]
        ]
        results = verify(selected, device=self.device)
        methods = {
            name: {"cases": len(of_method), "passed": sum(result.passed for result in of_method)}
            for name in METHODS
            if (of_method := [result for result in results if result.case.method == name])
        }
        differences = {result.case.id: result.difference for result in results if not result.passed}
        passed = len(results) - len(differences)
        facts = {
            "dtype": "float32",
            "cases": len(results),
            "passed": passed,
            "methods": methods,
            "differences": differences,
            "note": f"{passed} of {len(results)} cases",
        }
        if differences:
            name, difference = next(iter(differences.items()))
            facts["failed"] = (
                f"{len(differences)} of {len(results)} golden cases differ, the first: {name}: {difference}"
            )
        return facts


@dataclass(frozen=True, kw_only=True)
class AgreementCheck(Check):
    """Measures how often bfloat16 picks another token than float32."""

    model: str
    weights: str
    prompts_of: str
    """Platform whose prompts are used."""
    num_prompts: int

    def look(self) -> Facts:
        from repro.runs.experiment import prepare

        random = (("weights", "random"),) if self.weights == "random" else ()
        cell = Cell(
            system="dllm-serve",
            dataset="burst",
            platform=self.prompts_of,
            executor="torch",
            knobs=(("num_prompts", self.num_prompts), *random),
        )
        requests = prepare(cell).workload.requests
        exact, rounded = load_pair(self.model, weights=self.weights, device=self.device)  # type: ignore[arg-type]
        agreement = top1_agreement(exact, rounded, requests)
        return {
            "model": self.model,
            "weights": self.weights,
            **agreement,
            "note": f"{100 * agreement['share']:.2f} % of {agreement['n']} masked positions",
        }


@dataclass(frozen=True, kw_only=True)
class Benchmark(Check):
    """Runs one of the scripts in ``repro/bench`` in its own process. Its rows become facts."""

    is_apart = True
    script: str
    options: str = ""
    """One or more, separated by blanks."""
    has_device: bool = True
    """Whether the script runs on the device; False: only on the host."""

    def look(self) -> Facts:
        import json

        with tempfile.TemporaryDirectory(prefix="repro-benchmark-") as folder:
            rows = Path(folder, "rows.json")
            script = str(REPO / "repro" / "bench" / f"{self.script}.py")
            device = ["--device", self.device] if self.has_device else []
            options = [*device, "--json", str(rows), *self.options.split()]
            timeout = None
            try:
                done = _run_command([sys.executable, script, *options], self.limit_s)
            except UserError as error:
                # Keep the rows that were written so far.
                timeout, done = str(error), subprocess.CompletedProcess([], 1, "", "")
            content = json.loads(rows.read_text(encoding="utf-8")) if rows.is_file() else None
        lines = done.stdout.strip().splitlines()
        return {
            "returncode": done.returncode,
            "output": (done.stdout + done.stderr)[-4000:],
            "rows": content,
            "note": lines[0] if lines else "no output",
            "failed": timeout or (_last_line(done) if done.returncode else None),
        }


GPU_TESTS = CheckSystem("gpu-tests", GpuTests)
GOLDENS = CheckSystem("goldens", Goldens)
AGREEMENT = CheckSystem("agreement", AgreementCheck)
BENCHMARK = CheckSystem("benchmark", Benchmark)


def check_cell(name: str, platform: str, **knobs: Any) -> Cell:
    """The cell of a check. ``name`` is one of the constants above."""
    return Cell(
        system=f"{__name__}:{name}", dataset="none", platform=platform, executor="torch", knobs=tuple(knobs.items())
    )


def _run_command(command: Sequence[str], limit_s: float) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join(filter(None, (str(REPO), os.environ.get("PYTHONPATH"))))
    try:
        return subprocess.run(
            command,
            cwd=REPO,
            env={**os.environ, "PYTHONPATH": path},
            capture_output=True,
            text=True,
            check=False,
            timeout=max(1.0, limit_s),
        )
    except subprocess.TimeoutExpired as error:
        raise UserError(f"{' '.join(command[1:3])} did not end within {limit_s:.0f} s: give it more time") from error


def _last_line(process: subprocess.CompletedProcess[str]) -> str:
    lines = (process.stdout + process.stderr).strip().splitlines()
    return lines[-1] if lines else f"exit code {process.returncode}"
