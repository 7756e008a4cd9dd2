"""Tells what this machine can run, and why it cannot run the rest. It only looks: it installs, downloads and runs nothing."""

import csv
import os
import shutil
import sys
from collections.abc import Mapping
from ctypes import CDLL
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Literal, NamedTuple

from engines.cost.kernels import tables_of
from engines.cost.roofline import GPUS, gpu_of_device
from engines.errors import UserError
from engines.machine import version_of
from engines.models.checkpoint import EMBEDDED
from engines.models.shape import BLOCK_DIFFUSION, CATALOGUE
from repro import paths
from repro.families.cost import CostKnobs, describe_calibration, load_calibration
from repro.families.platforms import MIB, PLATFORMS, Platform, platform
from repro.runs.provenance import collect, nvidia_smi
from repro.tasks.registry import TASKS, TaskEntry
from repro.tasks.sandbox.client import CONSENT_OPTION, jail_refusal
from repro.workloads.card import DATA_DIR_VARIABLE, find_data_dir
from repro.workloads.dataset import known_datasets, load_card

Status = Literal["ok", "no", "info"]

with Path(__file__).with_name("packages.csv").open(newline="", encoding="utf-8") as _listed:
    OPTIONAL: Mapping[str, str] = {row["package"]: row["adds"] for row in csv.DictReader(_listed)}
"""Packages that are never required -> what they add."""

MIN_DISK_BYTES = 10**9
"""Least free disk. Runs and figures take less, but below this a sweep may stop half-way."""
CARD_TOLERANCE = 0.93
"""A card reports up to 7 % less memory than its nominal size (ECC, driver)."""


@dataclass(frozen=True, kw_only=True)
class FoundGpu:
    name: str
    memory_bytes: int


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Facts about the machine, without judgement. None and empty mean absent or unknown."""

    python: tuple[int, int, int]
    torch: str | None
    torch_error: str | None
    """Why an installed torch cannot be loaded."""
    cuda: str | None
    """The CUDA version that torch was built for."""
    gpus: tuple[FoundGpu, ...]
    has_nvidia_driver: bool
    cpu: str | None
    cores: int | None
    memory_bytes: int | None
    disk_free_bytes: int
    packages: tuple[tuple[str, str | None], ...]
    data_dir: Path | None
    data_dir_error: str | None
    missing_weights: tuple[str, ...]
    """Files that embedded checkpoints lack."""
    has_git: bool
    commit: str | None
    jail_refusal: str | None = None
    """Why programs written by a model cannot be confined; None if they can."""


class Item(NamedTuple):
    """A row of the report. ``ok`` and ``no`` tell whether the item can be used; ``info`` only informs."""

    item: str
    status: Status
    detail: str


def inspect_machine() -> Machine:
    """Inspect the machine. This loads a torch that was built for cards, because only torch knows which cards it can use."""
    cuda, torch_error, gpus = torch_and_cards()
    data_dir, data_dir_error = None, None
    try:
        data_dir = find_data_dir(None)
    except UserError as error:
        data_dir_error = str(error)
    # The provenance of a run that would start now.
    provenance = collect(obtained="measured")
    return Machine(
        python=sys.version_info[:3],
        torch=version_of("torch"),
        torch_error=torch_error,
        cuda=cuda,
        gpus=gpus,
        has_nvidia_driver=shutil.which("nvidia-smi") is not None,
        cpu=provenance["cpu"]["model"],
        cores=provenance["cpu"]["usable"],
        memory_bytes=provenance["memory_bytes"],
        disk_free_bytes=shutil.disk_usage(paths.RESULTS.parent).free,
        packages=tuple((name, version_of(name)) for name in OPTIONAL),
        data_dir=data_dir,
        data_dir_error=data_dir_error,
        missing_weights=tuple(
            f"{folder.name}/{name}"
            for folder in EMBEDDED.values()
            for name in ("config.json", "model.safetensors", "tokenizer.json")
            if not (folder / name).is_file()
        ),
        has_git=shutil.which("git") is not None,
        commit=provenance["git"]["commit"],
        jail_refusal=jail_refusal(),
    )


def rows_for(machine: Machine) -> tuple[Item, ...]:
    """Rows for software, hardware and data, then one row per platform and executor."""
    memory = "unknown" if machine.memory_bytes is None else _gigabytes(machine.memory_bytes)
    build = "CPU build" if machine.cuda is None else f"CUDA {machine.cuda}"
    return (
        Item("python", "ok", ".".join(map(str, machine.python))),
        _item("torch", f"{machine.torch}, {build}", _torch_reason(machine)),
        _gpu_row(machine),
        Item(
            "CPU",
            "info",
            f"{machine.cpu or 'unknown model'}, {machine.cores or 'unknown number of'} "
            f"core{'s' * (machine.cores != 1)} usable",
        ),
        Item("memory", "info", memory),
        _item("disk", f"{_gigabytes(machine.disk_free_bytes)} free", _disk_reason(machine)),
        _git_row(machine),
        _item("embedded model", "present", _no_checkpoint_reason(machine)),
        _data_dir_row(machine),
        *(_dataset_row(machine, name) for name in known_datasets()),
        *(_task_row(machine, task) for task in TASKS.values()),
        _generated_code_row(machine),
        *(_package_row(name, version) for name, version in machine.packages),
        *(
            row
            for platform in map(PLATFORMS.get, PLATFORMS)
            for row in (_measured_row(machine, platform), _simulated_row(platform))
        ),
    )


# -- rows -------------------------------------------------------------------------------------------------


def _item(item: str, detail: str, why_not: str | None) -> Item:
    return Item(item, "ok", detail) if why_not is None else Item(item, "no", why_not)


def _torch_reason(machine: Machine) -> str | None:
    if machine.torch is None:
        return "torch is not installed: run 'make setup'"
    if machine.torch_error is not None:
        return f"torch {machine.torch} cannot be loaded ({machine.torch_error}): install it again"
    return None


def _gpu_row(machine: Machine) -> Item:
    if machine.gpus:
        return Item("GPU", "ok", "; ".join(f"{gpu.name}, {_gigabytes(gpu.memory_bytes)}" for gpu in machine.gpus))
    return Item("GPU", "info", f"none: {_no_gpu_reason(machine)}")


def _no_gpu_reason(machine: Machine) -> str:
    if machine.has_nvidia_driver and machine.cuda is None:
        return "no CUDA device, an NVIDIA driver is there but torch is a CPU build: 'make clean', then 'make setup TORCH=torch'"
    return "no CUDA device"


def _disk_reason(machine: Machine) -> str | None:
    if machine.disk_free_bytes >= MIN_DISK_BYTES:
        return None
    free, least = _gigabytes(machine.disk_free_bytes), _gigabytes(MIN_DISK_BYTES)
    return f"{free} free: make at least {least} free for runs and figures"


def _git_row(machine: Machine) -> Item:
    if machine.commit is not None and machine.has_git:
        return Item("git", "ok", f"commit {machine.commit[:12]}")
    reason = "not a checkout with commits" if machine.has_git else "not installed"
    return Item("git", "info", f"{reason}: runs are stored without a commit")


def _no_checkpoint_reason(machine: Machine) -> str | None:
    if not machine.missing_weights:
        return None
    return f"an embedded checkpoint lacks {', '.join(machine.missing_weights)}: restore it, or run 'repro train-tiny'"


def _data_dir_row(machine: Machine) -> Item:
    if machine.data_dir_error is not None:
        return Item(DATA_DIR_VARIABLE, "no", machine.data_dir_error)
    if machine.data_dir is None:
        return Item(DATA_DIR_VARIABLE, "info", "not set: prompts come from the embedded generators")
    return Item(DATA_DIR_VARIABLE, "ok", str(machine.data_dir))


def _local_file(machine: Machine, name: str) -> str | None:
    """The data set's file in the data folder; None if it is not there."""
    folder = machine.data_dir
    paths = [file.path for file in load_card(name).local]
    return next((path for path in paths if folder is not None and (folder / path).is_file()), None)


def _dataset_row(machine: Machine, name: str) -> Item:
    """Says where source=auto takes the prompts from."""
    file = _local_file(machine, name)
    return Item(f"dataset {name}", "ok", "embedded generator" if file is None else f"local file {file}")


def _task_row(machine: Machine, task: TaskEntry) -> Item:
    """Whether ``repro eval`` has the task's problems and, for code, a place to run it."""
    reasons = []
    if not task.is_generated and _local_file(machine, task.name) is None:
        files = ", ".join(file.path for file in load_card(task.name).local)
        reasons.append(
            f"its problems are not here: set {DATA_DIR_VARIABLE} to a folder with one of {files}, or use --dataset-source hub"
        )
    if task.runs_code and machine.jail_refusal is not None:
        reasons.append("generated code is not run here")
    text = "generated problems" if task.is_generated else "its problems are here"
    return _item(f"task {task.name}", text, "; ".join(reasons) or None)


def _generated_code_row(machine: Machine) -> Item:
    refusal = machine.jail_refusal
    why_not = None if refusal is None else f"not run, as {refusal}, or allow it unconfined with {CONSENT_OPTION}"
    return _item("generated code", "confined by bubblewrap", why_not)


def _package_row(name: str, version: str | None) -> Item:
    if version is None:
        return Item(name, "info", f"not installed, optional: {OPTIONAL[name]}")
    return Item(name, "ok", f"{version}: {OPTIONAL[name]}")


def _measured_row(machine: Machine, platform: Platform) -> Item:
    why_not = _not_measurable(machine, platform)
    if platform.executor == "http":
        detail = "yes, at the client: 'repro bench --url URL'"
    elif platform.gpu is None:
        detail = f"yes, on {machine.cpu or 'this CPU'}"
    else:
        detail = f"yes, numbers are those of {_largest(machine).name}" if machine.gpus else ""
    return _item(f"{platform.name} measured", detail, why_not)


def _not_measurable(machine: Machine, platform: Platform) -> str | None:
    if platform.executor == "http":
        has_client = dict(machine.packages).get("aiohttp")
        return None if has_client else "aiohttp is not installed: pip install 'dllm-serve-repro[http]'"
    # The memory that the engine of one card plans with; clusters have none.
    planned = (getattr(part, name, None) for part in platform.parts for name in ("memory_bytes", "memory_limit"))
    needed = next((size for size in planned if size is not None), None)
    if needed is None:
        return "clusters are simulated only"
    if (reason := _torch_reason(machine)) is not None:
        return reason
    if platform.gpu is None:
        return _no_checkpoint_reason(machine)
    if not machine.gpus:
        return _no_gpu_reason(machine)
    largest = _largest(machine)
    if largest.memory_bytes < CARD_TOLERANCE * needed:
        return (
            f"{largest.name} has {_gigabytes(largest.memory_bytes)} and the platform plans with "
            f"{_gigabytes(needed)}: use a larger card or a smaller memory limit"
        )
    return None


def _simulated_row(platform: Platform) -> Item:
    item = f"{platform.name} simulated"
    if platform.gpu is None:
        return Item(item, "no", "the platform names no GPU to simulate: measure instead")
    by_roofline = f"roofline of {describe_calibration(load_calibration(platform.gpu))}"
    names = {str(getattr(part, "model", "")).lower() for part in platform.parts}
    shape = next((shape for shape in (*CATALOGUE, *BLOCK_DIFFUSION) if shape.name.lower() in names), None)
    charged = CostKnobs().on(platform.gpu, shape)
    if charged.framework is None:
        return Item(item, "ok", f"yes, {by_roofline}")
    card = tables_of(platform.gpu, shape).card
    moved = "" if card == platform.gpu else f", transferred to the {platform.gpu}"
    return Item(
        item,
        "ok",
        f"yes, composed of {charged.framework} kernels measured on the {card}{moved}; with cost=roofline, {by_roofline}",
    )


def _largest(machine: Machine) -> FoundGpu:
    return max(machine.gpus, key=lambda gpu: gpu.memory_bytes)


def _gigabytes(count: int) -> str:
    return f"{count / 1e9:.1f} GB"


def torch_and_cards() -> tuple[str | None, str | None, tuple[FoundGpu, ...]]:
    """The CUDA version torch was built for, why torch cannot be loaded, and the cards it can use. A CPU build knows no cards, and its
    package takes a second to load. For such a build we only try to load its library."""
    try:
        spec = find_spec("torch")
        folder = None if spec is None or spec.origin is None else Path(spec.origin).parent
        if folder is not None and "+cpu" in (version_of("torch") or ""):
            CDLL(str(folder / "lib" / "libtorch_cpu.so"))
            return None, None, ()
        import torch
    except (ImportError, OSError, ValueError) as error:  # OSError: a shared library of it is missing
        return None, f"{type(error).__name__}: {error}", ()
    if not torch.cuda.is_available():
        return torch.version.cuda, None, ()
    devices = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    return torch.version.cuda, None, tuple(FoundGpu(name=card.name, memory_bytes=card.total_memory) for card in devices)


def driver_card() -> FoundGpu | None:
    """The first card that this process may use, according to nvidia-smi; None if it cannot tell."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0].strip()
    name, _, mebibytes = (nvidia_smi("name,memory.total", "-i", visible) or "").rpartition(",")
    is_told = mebibytes.strip().isdecimal()
    return FoundGpu(name=name.strip(), memory_bytes=int(mebibytes) * MIB) if is_told else None


def torch_card() -> FoundGpu | str:
    """The card that torch runs on, or why there is none. Torch also knows slices of a card, which nvidia-smi does not report."""
    _, error, cards = torch_and_cards()
    if error is not None:
        return f"torch cannot be loaded ({error})"
    return cards[0] if cards else "torch sees no CUDA device"


def platform_on(card: FoundGpu | None, name: str | None) -> str:
    """The platform to measure on: the card's, which must equal ``name`` if given. Raises UserError for a card without a platform, and for
    a platform of another card."""
    known = None if card is None else gpu_of_device(card.name)
    names = [gpu.name for gpu in GPUS if gpu.name in PLATFORMS and platform(gpu.name).default_system == "dllm-serve"]
    if name is None:
        if card is None:
            raise UserError("platform is not given and this machine has no NVIDIA card that tells it: give --platform")
        if known is None or known.name not in names:
            raise UserError(
                f"this machine's card {card.name!r} is none that a platform stands for ({', '.join(names)}): give --platform "
                "module:NAME"
            )
        return known.name
    chosen = platform(name)
    if card is None or chosen.gpu is None or (known is None and chosen.name not in PLATFORMS):
        return name
    if known is None or known.name != str(chosen.gpu):
        fix = "module:NAME of your own" if known is None or known.name not in names else known.name
        raise UserError(
            f"platform={name!r} is a {chosen.title}, and this machine has {card.name!r}: give --platform {fix}"
        )
    return name
