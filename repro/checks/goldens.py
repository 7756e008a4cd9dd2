"""Golden cases: recorded token ids of every sampler, replayed through the code of ``repro generate``.

A folder holds ``cases.json`` and the checkpoints it names. The file has ``checkpoints`` (name -> path, sha256), ``ties`` and ``cases``.
``ties`` tells how equal values were ordered in the recording: ``stable``, or by default ``library``. A case has id, checkpoint, method,
params, prompt_ids, expected_ids, and if known nfe, rows, committed and tie_sensitive. Other keys are ignored, except that ``format`` must
be 1 if given, and ``params`` may hold only what the replay applies.
"""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

import baselines
from engines.dllm.config import GenerationConfig
from engines.dllm.method import EVERYONES
from engines.errors import UserError
from engines.models.checkpoint import read_config, read_json
from repro.generation import GenerateOptions, generate, prepare_generation

GOLDEN_DIR = Path(baselines.__file__).parent / "golden"
"""The cases in the package; its README.md says where their ids come from."""

TIES = ("stable", "library")


@dataclass(frozen=True, kw_only=True)
class GoldenReplay:
    """How to call the method of a case."""

    system: str
    options: Mapping[str, Any] = field(default_factory=dict)
    params: Mapping[str, str] = field(default_factory=dict)
    """Required parameter of the case -> option."""
    optional: Mapping[str, str] = field(default_factory=dict)
    """Optional parameter of the case -> option; null counts as 0."""
    generation: Mapping[str, Any] = field(default_factory=dict)
    """Generation settings: a value, or the name of the case's parameter."""
    applied: Mapping[str, Any] = field(default_factory=dict)
    """Parameters that can have only this value, which the method uses anyway."""
    steps: bool = True
    """Whether the case gives the number of steps."""
    ties: str | None = None
    """The only order of equal values that the system has."""


_STORED = yaml.safe_load(Path(__file__).with_name("golden_methods.yaml").read_text(encoding="utf-8"))
_METHODS = {name: GoldenReplay(**options) for name, options in _STORED["methods"].items()}
METHODS = tuple(_METHODS)

_KINDS: Mapping[str, tuple[type, ...]] = {
    name: kinds
    for kind, kinds in (("integer", (int,)), ("number", (int, float)), ("boolean", (bool,)), ("list", (list,)))
    for name in _STORED["params"][kind]
}
_KIND_NAMES = {int: "an integer", float: "a number", bool: "true or false", list: "a list"}


@dataclass(frozen=True, kw_only=True)
class GoldenCase:
    id: str
    method: str
    options: GenerateOptions
    params: Mapping[str, Any]
    prompt_ids: tuple[int, ...]
    expected_ids: tuple[int, ...]
    nfe: int | None
    """Forward passes as the method's published code counts them; None if not recorded."""
    rows: tuple[int, ...] | None
    """Rows that each forward computes; None if not recorded."""
    committed: tuple[int, ...] | None
    """Tokens that each forward commits; None if not recorded."""
    tie_sensitive: bool
    """Whether the ids depend on the order in which equal values are taken."""
    required: bool
    """False if the ids depend on a library's unspecified order of equal values, or on a recorded defect."""


@dataclass(frozen=True, kw_only=True)
class CaseResult:
    case: GoldenCase
    token_ids: tuple[int, ...]
    forward_passes: int
    rows: tuple[int, ...] = ()
    committed: tuple[int, ...] = ()

    @property
    def difference(self) -> str | None:
        """The first difference from the record, in words; None if there is none."""
        if (difference := other_ids(self.token_ids, self.case.expected_ids)) is not None:
            return difference
        if self.case.nfe is not None and self.forward_passes != self.case.nfe:
            return f"{self.forward_passes} forward passes, recorded {self.case.nfe}"
        for what, ours, golden in (
            ("computes rows", self.rows, self.case.rows),
            ("commits tokens", self.committed, self.case.committed),
        ):
            if golden is not None and ours != golden:
                step = next((i for i, (a, b) in enumerate(zip(ours, golden, strict=False)) if a != b), len(golden))
                return f"forward {step} {what} {ours[step : step + 1]}, recorded {golden[step : step + 1]}"
        return None

    @property
    def passed(self) -> bool:
        return self.difference is None


def other_ids(ids: Sequence[int], expected: Sequence[int]) -> str | None:
    """The first token that differs from the record, or else a different number of tokens; None if all are equal."""
    for position, (token, wanted) in enumerate(zip(ids, expected, strict=False)):
        if token != wanted:
            return f"token {position} is {token}, recorded {wanted}"
    return None if len(ids) == len(expected) else f"{len(ids)} tokens, recorded {len(expected)}"


def read_cases(folder: Path) -> tuple[GoldenCase, ...]:
    """Read the cases of ``folder``, each with the options that replay it. Every possible UserError is raised here."""
    path = folder / "cases.json"
    if not path.is_file():
        raise UserError(f"golden={str(folder)!r} has no cases.json: give a folder of golden cases")
    raw, where = read_json(path), str(path)
    layout = raw.get("format", 1)
    if type(layout) is not int or layout != 1:
        raise UserError(f"{where} has format={layout!r}: only format 1 can be read, give cases in it")
    named, entries = _value(raw, "checkpoints", dict, where), _value(raw, "cases", list, where)
    if not entries:
        raise UserError(f"{where} has no cases: give a folder with at least one")
    ties = raw.get("ties", "library")
    if ties not in TIES:
        raise UserError(f"{where} has ties={ties!r}: use one of {', '.join(TIES)}")
    checkpoints = {name: _checkpoint(folder, entry, f"{where}, checkpoint {name!r},") for name, entry in named.items()}
    return tuple(_case(entry, checkpoints, ties, where) for entry in entries)


def verify(
    cases: Iterable[GoldenCase], on_case: Callable[[], object] = lambda: None, *, device: str = "cpu"
) -> list[CaseResult]:
    """Replays the cases in float32, as they were recorded. Another device must give the same ids despite its rounding."""
    results = []
    with one_thread():
        for case in cases:
            results.append(replay(case, device=device))
            on_case()
    return results


@contextmanager
def one_thread() -> Iterator[None]:
    """Sets torch to one thread. The models are too small for several threads, which would only wait for each other on busy cores."""
    import torch

    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)


def replay(case: GoldenCase, *, device: str = "cpu") -> CaseResult:
    generated = generate(replace(case.options, device=device), case.prompt_ids)
    return CaseResult(case=case, **vars(generated))


def _value(entry: Any, key: str, kind: type, place: str) -> Any:
    if not isinstance(entry, dict) or key not in entry:
        raise UserError(f"{place} lacks {key!r}: restore the file or give another folder of golden cases")
    if not isinstance(entry[key], kind):
        raise UserError(
            f"{place} has a {type(entry[key]).__name__} for {key!r}, where {kind.__name__} belongs: restore the file"
        )
    return entry[key]


def _token_ids(entry: Any, key: str, place: str) -> tuple[int, ...]:
    values = _value(entry, key, list, place)
    if not values or any(type(value) is not int for value in values):
        raise UserError(f"{place} has {key!r} that are not a list of token ids: restore the file")
    return tuple(values)


def _checkpoint(folder: Path, entry: Any, place: str) -> Path:
    directory = folder / _value(entry, "path", str, place)
    if not directory.is_dir():
        raise UserError(f"{place} lies at {directory}, which is not a directory: restore it")
    read_config(directory)
    weights = directory / "model.safetensors"
    if not weights.is_file():
        raise UserError(f"{place} has no {weights}: restore it")
    if "sha256" in entry and hashlib.sha256(weights.read_bytes()).hexdigest() != entry["sha256"]:
        raise UserError(f"{place} has other weights in {weights} than the cases were recorded with: restore them")
    return directory


def _case(entry: Any, checkpoints: Mapping[str, Path], ties: str, place: str) -> GoldenCase:
    name = _value(entry, "id", str, f"{place}, a case")
    place = f"{place}, case {name!r},"
    method, checkpoint = _value(entry, "method", str, place), _value(entry, "checkpoint", str, place)
    if method not in _METHODS:
        raise UserError(f"{place} has method {method!r}: known are {', '.join(_METHODS)}")
    if checkpoint not in checkpoints:
        known = ", ".join(checkpoints) or "no checkpoint"
        raise UserError(f"{place} has checkpoint {checkpoint!r}: the file names {known}")
    params = _value(entry, "params", dict, place)
    _check_params(method, params, place)
    prompt_ids = _token_ids(entry, "prompt_ids", place)
    try:
        options = _options(method, params, checkpoints[checkpoint], ties)
        prepared = prepare_generation(options)
        prepared.request(prompt_ids)
    except (UserError, TypeError) as error:
        raise UserError(f"{place} cannot be replayed: {error}") from error
    if (length := options.generation.block_length) != prepared.generation.block_length:
        raise UserError(f"{place} has params block_length={length}, but method {method!r} has no blocks: remove it")
    tie_sensitive = bool(entry.get("tie_sensitive"))
    # The recorded code read cache rows that it had never written, so no rule defines these ids.
    is_defect = params.get("delay0_first_block") == "unbuilt_zero_cache"
    return GoldenCase(
        id=name,
        method=method,
        options=options,
        params=params,
        prompt_ids=prompt_ids,
        expected_ids=_token_ids(entry, "expected_ids", place),
        nfe=None if entry.get("nfe") is None else _value(entry, "nfe", int, place),
        rows=None if entry.get("rows") is None else _token_ids(entry, "rows", place),
        committed=None if entry.get("committed") is None else _token_ids(entry, "committed", place),
        tie_sensitive=tie_sensitive,
        required=not is_defect and (ties == "stable" or not tie_sensitive),
    )


def _check_params(method: str, params: Mapping[str, Any], place: str) -> None:
    """Raises UserError if a required parameter is missing, or if the replay would not apply a given one."""
    upstream, dream, spec = method.startswith("dllm_serve_upstream_"), method.startswith("dream_"), _METHODS[method]
    names = [name for name in spec.generation.values() if isinstance(name, str)]
    required = ["gen_length", *(["steps"] if spec.steps else []), *spec.params, *names]
    optional = {"block_length", "threshold", "factor", "cfg_scale", *spec.optional}
    if upstream:
        required.append("first_token_rule")
        # Options of the recorded run's own engine, whose schedule changes no ids.
        optional |= {"head_select", "max_num_batched_tokens"}
    elif "dllm_serve_" in method and not dream:
        optional.add("first_token_rule")
    missing = [key for key in required if params.get(key) is None]
    if missing:
        raise UserError(f"{place} lacks params {', '.join(missing)}: method {method!r} needs them")
    applied: dict[str, tuple[object, ...]] = {"temperature": (0,)}
    applied |= {"alg_temp": (0,)} if dream else {"remasking": ("low_confidence",)}
    applied |= {name: (value,) for name, value in spec.applied.items()}
    if upstream:
        applied["head_select"] = (method.endswith("_head"),)
        if params["delay_step"] == 0:
            applied["delay0_first_block"] = ("built", "unbuilt_zero_cache")
    for key, value in params.items():
        if key not in (*required, *optional, *applied):
            raise UserError(f"{place} has params {key}={value!r}, which method {method!r} does not apply: remove it")
        kinds = _KINDS.get(key, (str,))
        if value is not None and type(value) not in kinds:
            name = _KIND_NAMES.get(kinds[-1], "a string")
            raise UserError(f"{place} has params {key}={value!r}, where {name} belongs: correct it")
        if value is not None and key in applied and value not in applied[key]:
            allowed = " or ".join(map(repr, applied[key]))
            raise UserError(f"{place} has params {key}={value!r}, but method {method!r} applies {allowed}: correct it")


def _list_text(value: Any) -> Any:
    """A list as the text of an option; semicolons separate inner lists."""
    if not isinstance(value, list):
        return value
    return (";" if any(isinstance(item, list) for item in value) else ",").join(str(_list_text(item)) for item in value)


def _options(method: str, params: Mapping[str, Any], checkpoint: Path, ties: str) -> GenerateOptions:
    """The options that a user would give for this case."""
    spec = _METHODS[method]
    # Settings of the generation itself are also passed as options, so that a system without them refuses them.
    shared = {name: params[name] for name in ("threshold", "factor") if params.get(name) is not None}
    if params.get("cfg_scale"):
        shared["cfg_scale"] = params["cfg_scale"]
    knobs = {**spec.options, **{option: _list_text(params[name]) for name, option in spec.params.items()}}
    knobs |= {option: params[name] or 0 for name, option in spec.optional.items() if name in params}
    fields = {n: params[value] if isinstance(value, str) else value for n, value in spec.generation.items()}
    specific = {name: value for name, value in fields.items() if name not in EVERYONES}
    knobs |= {**shared, **specific}
    if spec.system == "dllm-serve" and params.get("first_token_rule") and knobs["refresh_delay"] > 0:
        knobs["compat"] = "upstream"
    length = params["gen_length"]
    has_blocks = params.get("block_length") is not None and "block_length" not in spec.params
    generation = GenerationConfig(
        gen_length=length,
        block_length=params["block_length"] if has_blocks else length,
        steps=params["steps"] if spec.steps else length,
        **shared,
        **fields,
    )
    # Parallel decoding commits by the level of confidence, so equal values have no order.
    library = spec.ties or (None if generation.is_parallel else "parity")
    return GenerateOptions(
        system=spec.system,
        model=str(checkpoint),
        generation=generation,
        knobs=knobs,
        tie_policy="stable" if ties == "stable" else library,
    )
