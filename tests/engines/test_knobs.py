"""Settings say for themselves what they may be: kinds, choices, ranges, and beside what they have an effect.

Files that a user names: regular ones are read, anything else is one sentence at once.

Least squares without a library: as exact as one, and the same bits where a library's differ.
"""

import math
import os
import socket
import subprocess
import sys
from dataclasses import dataclass, field, make_dataclass
from typing import Annotated, Any, Literal

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.refusals import refuses
from support.tables import data_beside

from engines.data import open_file, read_bytes, read_text
from engines.errors import UserError
from engines.knobs import (
    SOMETHING,
    Checked,
    Except,
    Fixed,
    Needs,
    Only,
    Range,
    build,
    check_requested,
    check_value,
    conditions_of,
    helps_of,
    knobs_of,
    with_knobs,
)
from engines.least_squares import dot, least_squares, reduced
from repro.paths import REPO

CASES = data_beside(__file__, "knobs")


@dataclass(frozen=True, kw_only=True)
class Cache(Checked):
    kind: Literal["dense", "sparse"] = "sparse"
    kept: Annotated[float, Range(above=0, most=1), Only(kind="sparse")] = 0.5
    """Share of rows
    that stay."""
    floor: Annotated[int, Fixed] = 1


@dataclass(frozen=True, kw_only=True)
class Engine(Checked):
    rows: Annotated[int, Range(1, 2**20)] = 8
    wait_s: Annotated[float, Range(0)] | None = None
    graphs: Annotated[bool, Only(executor="torch")] = True
    cache: Cache = field(default_factory=Cache)
    other: Annotated[Cache, Fixed] = field(default_factory=Cache)


@dataclass(frozen=True, kw_only=True)
class Sampling(Checked):
    temperature: Annotated[float, Range(0, 10)] = 0.0
    top_p: Annotated[float, Range(above=0, most=1), Needs(temperature=Range(above=0))] = 1.0
    factor: float | None = None
    threshold: Annotated[float, Needs(factor=None)] | None = None
    seed: Annotated[int, Fixed] = 0


@dataclass(frozen=True, kw_only=True)
class Served(Checked):
    sampling: Sampling
    cache: Cache = field(default_factory=lambda: Cache(kind="dense"))
    device: str = "cpu"
    router: str | None = None
    graphs: Annotated[bool, Only(device=Except("cpu"))] = True
    think_s: Annotated[float, Needs(rate=None)] = 0.0
    share: float | None = None
    patience: Annotated[float, Only(share=Range(above=0))] = 2.0
    is_first_done: Annotated[bool, Needs(router=SOMETHING)] | None = None
    pooling: Annotated[str, Only(router=SOMETHING, rate=None)] | None = None


def test_knobs_are_the_fields_that_are_not_fixed_of_settings_inside_too():
    assert list(knobs_of(Engine)) == ["rows", "wait_s", "graphs", "kind", "kept"]
    assert knobs_of(Engine)["kind"].choices == ("dense", "sparse")
    assert knobs_of(Engine)["wait_s"].may_be_none
    assert helps_of(Engine)["kept"] == "Share of rows that stay."


def test_given_values_reach_the_settings_they_are_of_as_their_kind():
    made = with_knobs(Engine(), {"rows": 3, "wait_s": 2, "kept": 1, "elsewhere": 7, "kind": None})
    assert made == Engine(rows=3, wait_s=2.0, cache=Cache(kept=1.0))
    assert (type(made.wait_s), type(made.cache.kept)) == (float, float)
    assert with_knobs(Engine(), {"floor": 4}) == Engine()


@pytest.mark.parametrize(("given", "beside", "sentence"), CASES["refused"])
def test_what_a_field_may_not_be_or_has_no_effect_is_refused(given, beside, sentence):
    with pytest.raises(UserError) as refused:
        with_knobs(Engine(), given, **beside)
    assert str(refused.value).startswith(sentence)


@pytest.mark.parametrize(("given", "beside", "names"), CASES["dependent"])
def test_a_refusal_names_the_field_and_the_other_that_it_depends_on(given, beside, names):
    with pytest.raises(UserError) as refused:
        with_knobs(build(Served, {}), given, **beside)
    assert all(name in str(refused.value) for name in names)


def test_what_others_allow_is_taken():
    given = {"graphs": False, "device": "cuda", "pooling": "each", "router": "mine", "top_p": 0.5, "temperature": 1.0}
    found = with_knobs(build(Served, {}), given, rate=None)
    assert (found.graphs, found.pooling, found.sampling.top_p) == (False, "each", 0.5)
    assert Sampling(top_p=1.0, temperature=0.0).top_p == 1.0, "a default needs nothing"
    assert with_knobs(build(Served, {}), {"think_s": 0.0, "top_p": 1.0}, rate=2.0) == build(Served, {})


def test_settings_are_made_of_values_by_name_and_keep_other_defaults():
    found = build(Served, {"seed": 7, "top_p": 1, "kept": 0.25, "elsewhere": 1}, device="cuda")
    assert found == Served(sampling=Sampling(seed=7), cache=Cache(kind="dense", kept=0.25), device="cuda")
    with pytest.raises(UserError, match="temperature=11"):
        build(Served, {"temperature": 11})


def test_conditions_are_said_in_words():
    said = {name: only.in_words for name, only in conditions_of(Served)}
    assert said["graphs"] == "device other than 'cpu'"
    assert said["pooling"] == "router given, no rate"
    assert said["top_p"] == knobs_of(Served)["top_p"].needs.in_words == "temperature above 0"


@pytest.mark.parametrize(
    ("given", "beside"), [({"graphs": False}, {}), ({"graphs": False}, {"executor": "torch"}), ({"kept": 0.1}, {})]
)
def test_what_has_an_effect_is_taken(given, beside):
    with_knobs(Engine(), given, **beside)


def test_a_name_that_none_has_is_refused_and_what_was_meant_is_told():
    sentence = r"^rwos=3 has no effect with here: leave it out, or use one of rows, wait_s, gr"
    with pytest.raises(UserError, match=sentence):
        check_requested({"rwos": 3}, Engine, owner="here")
    check_requested({"rows": 3, "wait_s": None}, Engine, owner="here")
    with refuses("rows=None"):
        check_requested({"rows": None}, Engine, owner="here")


def test_of_many_names_only_those_spelled_alike_are_told():
    many: Any = make_dataclass("Many", [(f"setting_{number:02}", int) for number in range(41)])
    for name, told in (("setting_400", ": leave it out, or use one of setting_40"), ("color", ": leave it out")):
        with pytest.raises(UserError) as refused:
            check_requested({name: 1}, many, owner="here")
        assert told in str(refused.value)
        assert str(refused.value).count("setting_0") <= 2


def test_a_value_by_itself_is_held_to_what_is_declared():
    check_value(Annotated[int, Range(1, 3)] | None, "jobs", None)
    check_value(Annotated[int, Range(1, 3)] | None, "jobs", 3)
    with refuses("jobs=4"):
        check_value(Annotated[int, Range(1, 3)] | None, "jobs", 4)
    with refuses("share=0.0"):
        check_value(Annotated[float, Range(0.005, 0.5)], "share", 0.0)
    for kind in (float, Annotated[float, Range(0)]):
        with refuses("wait_s=inf"):
            check_value(kind, "wait_s", math.inf)


def test_what_is_made_directly_is_checked_too():
    with refuses("floor='x'"):
        Cache(floor="x")


def test_a_field_that_type_checkers_alone_know_is_refused_in_a_sentence():
    sentence = r"settings Plugged declare a field by .* \(name 'Elsewhere' is not defined\): import"
    with pytest.raises(UserError, match=sentence):
        knobs_of(make_dataclass("Plugged", [("other", "Elsewhere")]))


def test_what_is_in_a_file_is_read_as_it_is(tmp_path):
    path = tmp_path / "a"
    path.write_bytes(b"\xef\xbb\xbfline\r\nline")
    assert read_bytes("file", path) == b"\xef\xbb\xbfline\r\nline"
    assert read_text("file", path) == "line\nline"
    link = tmp_path / "link"
    link.symlink_to(path)
    with open_file("file", link) as file:
        assert file.read() == path.read_bytes()


def special(tmp_path, kind):
    path = tmp_path / kind
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(str(path))
    elif kind == "folder":
        path.mkdir()
    elif kind == "loop":
        path.symlink_to(path)
    elif kind == "null":
        return tmp_path / "a\0b"
    elif kind == "long":
        return tmp_path / ("x" * 5000)
    elif kind == "below a file":
        path.write_text("")
        return path / "inner"
    return "/dev/zero" if kind == "device" else path


@pytest.mark.parametrize(
    "kind", ["pipe", "socket", "folder", "loop", "null", "long", "below a file", "device", "absent"]
)
def test_what_is_no_file_is_refused_at_once(kind, tmp_path):
    path = special(tmp_path, kind)
    for read in (open_file, read_bytes, read_text):
        with pytest.raises(UserError, match="platform="):
            read("platform", path)


def test_what_is_too_large_is_not_read(tmp_path):
    path = tmp_path / "large"
    with path.open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(UserError, match=r"platform=.* bytes"):
        read_bytes("platform", path)


def test_text_of_another_encoding_is_refused(tmp_path):
    path = tmp_path / "latin"
    path.write_bytes("é".encode("latin-1"))
    with pytest.raises(UserError, match="UTF-8"):
        read_text("grid", path)


FITTED = """
from engines.ampd.performance import profile_hardware
from engines.cluster.hardware import Hardware
from engines.cluster.hardware import PHYSICAL
from engines.cost.roofline import H20, H200
from engines.laps.cluster import PrefillCost
from engines.laps.latency import StepModel
from engines.models.shape import QWEN2_5_14B, QWEN3_32B
hardware = Hardware(shape=QWEN3_32B, gpu=H20, constants=PHYSICAL)
made = [profile_hardware(hardware, num_gpus=4, degrees=(4,)),
        StepModel.profile(PrefillCost(QWEN2_5_14B, H200))]
"""


@settings(max_examples=60)
@given(st.integers(0, 10**6), st.integers(1, 5), st.integers(1, 25))
def test_it_is_what_a_library_finds(seed, num_columns, num_rows):
    """Also where columns are sums of others, or empty, or fewer measurements than columns: the shortest of the best."""
    rng = np.random.default_rng(seed)
    features = rng.random((num_rows, num_columns)) * 10.0 ** rng.integers(-6, 6, num_columns)
    if seed % 3 == 0:
        features[:, -1] = 3 * features[:, 0]
    if seed % 7 == 0:
        features[:, 0] = 0.0
    norms = np.linalg.norm(features, axis=0)
    norms[norms == 0] = 1.0
    due = np.linalg.lstsq(features / norms, np.ones(num_rows), rcond=1e-12)[0]
    found = np.array(least_squares(features.T.tolist(), [1.0] * num_rows)) * norms
    # Two columns that are nearly one leave the digits that they differ by.
    worst = np.linalg.cond(features / norms)
    tolerance = 1e-9 if worst < 1e4 or worst > 1e13 else 1e-2
    assert found == pytest.approx(due, rel=tolerance, abs=tolerance * max(1.0, float(np.abs(due).max())))


def test_what_is_reduced_has_the_same_least_squares():
    columns = [[1.0, 1.0, 1.0, 1.0], [1.0, 2.0, 3.0, 5.0], [1.0, 4.0, 9.0, 25.0]]
    target = [2.0, 1.0, 4.0, 3.0]
    made = reduced(columns, target)
    for chosen in ((0,), (0, 1), (1, 2), (0, 1, 2)):
        whole = least_squares([columns[i] for i in chosen], target)
        assert least_squares([made.columns[i] for i in chosen], made.target) == pytest.approx(whole)
        missed = [
            sum(x * columns[i][row] for x, i in zip(whole, chosen, strict=True)) - target[row] for row in range(4)
        ]
        short = [
            sum(x * made.columns[i][row] for x, i in zip(whole, chosen, strict=True)) - made.target[row]
            for row in range(3)
        ]
        assert dot(short, short) + made.rest == pytest.approx(dot(missed, missed))


def test_what_simulations_are_fitted_to_is_the_same_on_another_kind_of_cpu():
    """The environment of an older machine: other kernels of the library of linear algebra, and numpy without its newer instructions."""
    here: dict[str, object] = {}
    exec(FITTED, here)
    older = {"OPENBLAS_CORETYPE": "Prescott", "NPY_DISABLE_CPU_FEATURES": "AVX2 FMA3 AVX512F AVX512_SKX X86_V3 X86_V4"}
    said = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", f"{FITTED}\nprint(repr(made))"],
        cwd=REPO,
        env={**os.environ, **older},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert said == f"{here['made']!r}\n"
