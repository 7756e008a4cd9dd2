"""Settings say for themselves what they may be: kinds, choices, ranges, and beside what they have an effect."""

import math
from dataclasses import dataclass, field, make_dataclass
from typing import Annotated, Any, Literal

import pytest
from support.refusals import refuses

from engines.errors import UserError
from engines.knobs import (
    SOMETHING,
    Checked,
    Except,
    Fixed,
    Needs,
    Only,
    Range,
    check_given,
    check_value,
    conditions_of,
    given_to,
    helps_of,
    knobs_of,
    made,
)


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
    made = given_to(Engine(), {"rows": 3, "wait_s": 2, "kept": 1, "elsewhere": 7, "kind": None})
    assert made == Engine(rows=3, wait_s=2.0, cache=Cache(kept=1.0))
    assert (type(made.wait_s), type(made.cache.kept)) == (float, float)
    assert given_to(Engine(), {"floor": 4}) == Engine()


@pytest.mark.parametrize(
    ("given", "beside", "sentence"),
    [
        ({"kind": "dense", "kept": 0.5}, {}, "kept=0.5 has no effect with kind='dense': leave it out"),
        (
            {"graphs": False},
            {"executor": "roofline"},
            "graphs=false has no effect with executor='roofline': leave it out",
        ),
        ({"rows": 0}, {}, "rows=0 must be at least 1"),
        ({"rows": 2**20 + 1}, {}, "rows=1048577 is more than 1,048,576, the most that is taken"),
        ({"rows": 2.5}, {}, "rows=2.5 must be a whole number"),
        ({"rows": True}, {}, "rows=True must be a whole number"),
        ({"kept": 0.0}, {}, "kept=0.0 must be in (0, 1]"),
        ({"kept": math.nan}, {}, "kept=nan must be a finite number"),
        ({"wait_s": -1}, {}, "wait_s=-1 must not be negative"),
        ({"kind": "denser"}, {}, "kind='denser' is unknown: use one of dense, sparse"),
    ],
)
def test_what_a_field_may_not_be_or_has_no_effect_is_refused(given, beside, sentence):
    with pytest.raises(UserError) as refused:
        given_to(Engine(), given, **beside)
    assert str(refused.value).startswith(sentence)


@pytest.mark.parametrize(
    ("given", "beside", "names"),
    [
        ({"graphs": False}, {}, ("graphs=false", "device='cpu'")),
        ({"pooling": "each"}, {}, ("pooling='each'", "without router")),
        ({"pooling": "each", "router": "mine"}, {"rate": 2.0}, ("pooling='each'", "rate=2.0")),
        ({"think_s": 0.5}, {"rate": 2.0}, ("think_s=0.5", "rate=2.0")),
        ({"is_first_done": False}, {}, ("is_first_done=false", "without router")),
        ({"patience": 1.0}, {}, ("patience=1.0", "without share")),
        ({"patience": 1.0, "share": 0.0}, {}, ("patience=1.0", "share=0.0")),
        ({"top_p": 0.5}, {}, ("top_p=0.5", "temperature=0.0")),
        ({"threshold": 0.9, "factor": 1.0}, {}, ("threshold=0.9", "factor=1.0")),
    ],
)
def test_a_refusal_names_the_field_and_the_other_that_it_depends_on(given, beside, names):
    with pytest.raises(UserError) as refused:
        given_to(made(Served, {}), given, **beside)
    assert all(name in str(refused.value) for name in names)


def test_what_others_allow_is_taken():
    given = {"graphs": False, "device": "cuda", "pooling": "each", "router": "mine", "top_p": 0.5, "temperature": 1.0}
    found = given_to(made(Served, {}), given, rate=None)
    assert (found.graphs, found.pooling, found.sampling.top_p) == (False, "each", 0.5)
    assert Sampling(top_p=1.0, temperature=0.0).top_p == 1.0, "a default needs nothing"
    assert given_to(made(Served, {}), {"think_s": 0.0, "top_p": 1.0}, rate=2.0) == made(Served, {})


def test_settings_are_made_of_values_by_name_and_keep_other_defaults():
    found = made(Served, {"seed": 7, "top_p": 1, "kept": 0.25, "elsewhere": 1}, device="cuda")
    assert found == Served(sampling=Sampling(seed=7), cache=Cache(kind="dense", kept=0.25), device="cuda")
    with pytest.raises(UserError, match="temperature=11"):
        made(Served, {"temperature": 11})


def test_conditions_are_said_in_words():
    said = {name: only.said for name, only in conditions_of(Served)}
    assert said["graphs"] == "device other than 'cpu'"
    assert said["pooling"] == "router given, no rate"
    assert said["top_p"] == knobs_of(Served)["top_p"].needs.said == "temperature above 0"


@pytest.mark.parametrize(
    ("given", "beside"), [({"graphs": False}, {}), ({"graphs": False}, {"executor": "torch"}), ({"kept": 0.1}, {})]
)
def test_what_has_an_effect_is_taken(given, beside):
    given_to(Engine(), given, **beside)


def test_a_name_that_none_has_is_refused_and_what_was_meant_is_told():
    with pytest.raises(
        UserError, match=r"^rwos=3 has no effect with here: leave it out, or use one of rows, wait_s, gr"
    ):
        check_given({"rwos": 3}, Engine, who="here")
    check_given({"rows": 3, "wait_s": None}, Engine, who="here")
    with refuses("rows=None"):
        check_given({"rows": None}, Engine, who="here")


def test_of_many_names_only_those_spelled_alike_are_told():
    many: Any = dataclass(frozen=True)(
        type(
            "Many",
            (),
            {"__annotations__": {f"setting_{number:02}": int for number in range(41)}, "__module__": __name__},
        )
    )
    for name, told in (("setting_400", ": leave it out, or use one of setting_40"), ("color", ": leave it out")):
        with pytest.raises(UserError) as refused:
            check_given({name: 1}, many, who="here")
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
    with pytest.raises(
        UserError, match=r"settings Plugged declare a field by .* \(name 'Elsewhere' is not defined\): import"
    ):
        knobs_of(make_dataclass("Plugged", [("other", "Elsewhere")]))
