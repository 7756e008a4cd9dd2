"""Token by token: the engine, the reference samplers and committed ids agree; and, where a folder of ids recorded
from published code is given, the engine reproduces those."""

import json
import os
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support.make_golden import CHECKPOINTS, GOLDEN, SAMPLERS, sample
from support.tables import data_beside

from engines.models.checkpoint import read_config
from repro.checks.goldens import GOLDEN_DIR, METHODS, CaseResult, GoldenCase, read_cases, replay

pytestmark = pytest.mark.usefixtures("models_loaded_once")
CASES = read_cases(GOLDEN_DIR)
BY_ROWS = {case.method for case in read_cases(Path(__file__).with_name("rows"))}


def of_method(method: str, cases: Sequence[GoldenCase] = CASES) -> list[GoldenCase]:
    return [case for case in cases if case.method == method]


def checkpoint_name(case: GoldenCase) -> str:
    return Path(case.options.model).name


def replay_under(case: GoldenCase, tie_policy: str | None) -> CaseResult:
    return replay(replace(case, options=replace(case.options, tie_policy=tie_policy)))


def is_ranked(case: GoldenCase) -> bool:
    """Whether ranks decide; parallel decoding commits by level, and takes no order of ties."""
    return not case.options.generation.is_parallel and case.rows is None


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_the_checkpoints_are_those_of_the_seeds(name):
    folder, model = GOLDEN / "checkpoints" / name, CHECKPOINTS[name]
    stored, made = load_file(folder / "model.safetensors"), model.weights()
    assert stored.keys() == made.keys()
    assert all(torch.equal(stored[key], made[key]) for key in made)
    assert read_config(folder) == model.config


def test_nothing_else_is_shipped():
    files = {path.relative_to(GOLDEN_DIR).as_posix(): path for path in GOLDEN_DIR.rglob("*") if path.is_file()}
    of_checkpoints = {f"checkpoints/{c}/{file}" for c in CHECKPOINTS for file in ("config.json", "model.safetensors")}
    assert files.keys() == {"README.md", "cases.json"} | of_checkpoints
    assert sum(path.stat().st_size for path in files.values()) < 1.5e6
    assert GOLDEN == GOLDEN_DIR


def test_every_method_has_cases():
    """Those recorded from dLLM-Serve's own code have the same rules as dllm_serve_*, and are in other folders; so are those of rules
    that are held to their rows (``test_row_rules``)."""
    counts = Counter(case.method for case in CASES)
    assert (
        counts.keys()
        == SAMPLERS.keys()
        == set(METHODS) - BY_ROWS - {"dllm_serve_upstream_head", "dllm_serve_upstream_uniform"}
    )
    assert min(counts.values()) >= 6
    assert all(case.required and case.nfe is not None for case in CASES)
    assert len({case.id for case in CASES}) == len(CASES)
    assert f"{len(CASES)} cases, {len(counts)} methods" in (GOLDEN_DIR / "README.md").read_text()


def values(methods: str, key: str) -> set[object]:
    return {case.params.get(key) for case in CASES if case.method.startswith(methods)}


def test_the_goldens_cover_the_grid():
    for methods, key, expected in data_beside(__file__, "goldens"):
        for method in methods:
            assert values(method, key) == {*expected}, (method, key)
    combined = {
        (case.method, case.params["delay_step"], case.params.get("threshold"), case.params["first_token_rule"])
        for case in CASES
        if case.method.startswith("dllm_serve")
    }
    assert len(combined & set(product(METHODS, (0, 1), (None, 0.25, 0.6), (False, True)))) == 3 * 3 * 3
    serve = [case.options.generation for case in CASES if case.method.startswith("dllm_serve")]
    assert any(generation.gen_length % generation.block_length for generation in serve)
    assert any(generation.steps > generation.gen_length for generation in serve)
    assert any(generation.steps < generation.gen_length for generation in serve)
    on = defaultdict(set)
    for case in CASES:
        on[case.method.split("_")[0]].add(checkpoint_name(case))
    assert on["dream"] == {"dream"}
    assert on["dllm"] == CHECKPOINTS.keys() - {"dream"}
    assert sum(case.tie_sensitive for case in CASES) > 10


def test_only_published_samplers_commit_a_mask_id():
    """One that stays in the text is how they behave; ours never commits it."""
    with_mask = {case.method for case in CASES if CHECKPOINTS[checkpoint_name(case)].mask_id in case.expected_ids}
    assert with_mask == {"llada", "sparse_dllm", "dllm_cache"}


def test_the_methods_give_different_ids():
    """A comparison that could not fail would prove nothing."""
    outputs: dict[object, dict[str, set[tuple[int, ...]]]] = defaultdict(lambda: defaultdict(set))
    for case in CASES:
        shape = case.options.generation
        key = (checkpoint_name(case), case.prompt_ids, shape.gen_length, shape.block_length, shape.steps)
        outputs[key][case.method].add(case.expected_ids)
    differ, pairs = Counter[frozenset[str]](), Counter[frozenset[str]]()
    for found in outputs.values():
        for a in found:
            for b in found:
                if a < b:
                    pairs[frozenset((a, b))] += 1
                    differ[frozenset((a, b))] += found[a].isdisjoint(found[b])
    # Two names for one loop.
    same = frozenset(("dream_vanilla", "dream_nocache"))
    assert pairs[same]
    assert not differ[same]
    assert len(pairs) > 40
    assert not [sorted(pair) for pair, count in pairs.items() if count >= 3 and pair != same and not differ[pair]]
    assert differ.total() > pairs.total() / 2


@pytest.mark.parametrize("method", SAMPLERS)
def test_reference_samplers(method):
    for case in of_method(method)[::4]:
        name = checkpoint_name(case)
        sampled = sample(name, method, CHECKPOINTS[name].weights(), case.prompt_ids, case.params)
        assert sampled.token_ids == case.expected_ids, case.id
        assert sampled.forwards == case.nfe, case.id


@pytest.mark.parametrize("method", SAMPLERS)
def test_engine_in_the_librarys_order(method):
    """Some of those that no tie decides, so that either rule gives the same ids. Under the stable rule
    ``verify-baselines`` replays every case, and its test with it."""
    cases = [case for case in of_method(method) if is_ranked(case) and not case.tie_sensitive][::3]
    assert cases
    for case in cases:
        assert replay_under(case, "parity").difference is None, case.id


FOLDER_VARIABLE = "REPRO_GOLDEN_DIR"


@pytest.fixture(scope="module")
def recorded() -> tuple[GoldenCase, ...]:
    folder = os.environ.get(FOLDER_VARIABLE)
    if not folder:
        pytest.skip(f"{FOLDER_VARIABLE} is not set: no ids recorded from published code to compare with")
    assert json.loads((Path(folder) / "cases.json").read_text()).get("ties", "library") == "library"
    return read_cases(Path(folder))


@pytest.mark.parametrize("method", METHODS)
def test_recorded_ids(method, recorded, record_property):
    """In the library's order, where a rank decides; every third case under the stable rule too, under which the committed
    cases are all replayed; and a method's first case by its default, which is one of the two."""
    cases = of_method(method, recorded)
    if not cases:
        pytest.skip(f"no {method} cases there")
    wrong, tally = [], Counter[str]()
    for i, case in enumerate(cases):
        library = "parity" if is_ranked(case) else None
        asked = (library, *(("stable",) if i % 3 == 0 else ()), *((None,) if i == 0 else ()))
        for policy in dict.fromkeys(asked) if case.required else (library,):
            found = replay_under(case, policy)
            label = (policy or "default") if case.required else "not required"
            tally[f"{label} {'equal' if found.passed else 'different'}"] += 1
            if case.required and not found.passed:
                wrong.append(f"{case.id} ({policy}): {found.difference}")
    record_property(method, dict(tally))
    print(f"{method}: {', '.join(f'{count} {what}' for what, count in sorted(tally.items()))}")
    assert not wrong
