"""Cards of all kinds and the distributions on them, read strictly."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from engines.errors import UserError
from repro.paths import DATASETS
from repro.workloads.card import Card, introductions
from repro.workloads.conversations import known_conversation_cards, load_conversation_card
from repro.workloads.dataset import CARDS_DIR, known_datasets, load_card
from repro.workloads.draws import LogNormalLengths, derive_seed, fit_statistics
from repro.workloads.sessions import known_session_cards, load_session_card

LOADERS: dict[str, Callable[[str, Path], Card]] = {
    "burst": load_card,
    "sessions/gaia": load_session_card,
    "conversations/sharegpt": load_conversation_card,
}


# What is said of a card without the rest of it -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("folder", "known", "load_one"),
    [
        ("", known_datasets, load_card),
        ("sessions", known_session_cards, load_session_card),
        ("conversations", known_conversation_cards, load_conversation_card),
    ],
)
def test_a_card_is_introduced_as_it_says_itself(folder, known, load_one):
    cards = [load_one(name) for name in known()]
    assert introductions(DATASETS / folder) == [(card.name, card.title, card.summary) for card in cards]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("title: [", "gaia.yaml is not YAML"),
        ("- title", "gaia.yaml: title and summary must be texts"),
        ("title: GAIA", "gaia.yaml: title and summary must be texts"),
    ],
)
def test_a_card_that_does_not_say_what_it_is_is_refused(tmp_path, text, said):
    (tmp_path / "gaia.yaml").write_text(text)
    with pytest.raises(UserError, match=said):
        introductions(tmp_path)


# Length distributions ------------------------------------------------------------------------------------------------


@given(mean=st.floats(20, 5000), spread=st.floats(0.05, 1.5))
@settings(max_examples=50, deadline=None)
def test_fits_return_what_a_log_normal_was_made_of(mean, spread):
    mu, sigma = math.log(mean), spread
    true_mean = math.exp(mu + sigma**2 / 2)
    true_std = true_mean * math.sqrt(math.expm1(sigma**2))
    p10, p90 = math.exp(mu - 1.2815515655 * sigma), math.exp(mu + 1.2815515655 * sigma)
    for statistics in (
        {"mean": true_mean, "std": true_std},
        {"mean": true_mean, "median": math.exp(mu)},
        {"p10": p10, "p90": p90},
        {"mean": true_mean, "sigma": sigma},
    ):
        assert fit_statistics(statistics) == pytest.approx((mu, sigma), rel=1e-6)


@pytest.mark.parametrize("bad", [{"mean": 3.0}, {"mean": 3.0, "median": 4.0}, {"mean": 0.0, "std": 1.0}, {}])
def test_statistics_that_determine_nothing_are_refused(bad):
    with pytest.raises(UserError):
        fit_statistics(bad)


def mean_of(dist: LogNormalLengths, high: float | None = None) -> float:
    """Before rounding, by numerical integration; clipped at ``high`` in place of its own bound."""
    z = np.linspace(-8, 8, 200_001)
    density = np.exp(-(z**2) / 2) / math.sqrt(2 * math.pi)
    lengths = np.clip(dist.offset + np.exp(dist.mu + dist.sigma * z), dist.low, dist.high if high is None else high)
    return float((lengths * density).sum() * (z[1] - z[0]))


# Cards ---------------------------------------------------------------------------------------------------------------


def test_the_cards_folder_is_no_package():
    assert not (CARDS_DIR / "__init__.py").exists(), "it would hide the Hugging Face library"


@pytest.mark.parametrize("name", known_datasets())
def test_card_is_complete(name):
    card = load_card(name)
    assert card.embedded.sources
    assert card.defects
    assert card.hub.revision is not None or "revision" in card.hub.note
    assert card.embedded.basis == ("assumed" if name == "livebench" else "fitted")


@pytest.mark.parametrize("name", known_datasets())
def test_embedded_lengths_have_the_card_s_statistics(name):
    """Mean and median of 20,000 draws, within four standard errors of what the card was fitted to."""
    card = load_card(name)
    dist, stats, n = card.embedded.lengths, dict(card.embedded.statistics), 20_000
    assert isinstance(dist, LogNormalLengths)
    draws = dist.draw(n, np.random.default_rng(derive_seed(0, name))).astype(float)
    assert mean_of(dist) == pytest.approx(
        stats["mean"] + dist.offset, rel=0.005
    )  # the card's clipping costs under 0.5 %
    assert draws.mean() == pytest.approx(mean_of(dist), abs=4 * draws.std() / math.sqrt(n))
    median = dist.offset + math.exp(dist.mu)
    density = 1 / ((median - dist.offset) * dist.sigma * math.sqrt(2 * math.pi))
    assert np.median(draws) == pytest.approx(median, abs=0.5 + 4 * 0.5 / (density * math.sqrt(n)))
    if "median" in stats:
        assert median == pytest.approx(stats["median"], rel=0.001)
    if "std" in stats:
        assert draws.std() == pytest.approx(stats["std"], rel=0.06)


def test_unknown_names_list_the_known_ones(tmp_path):
    for load, message in (
        (load_card, "dataset='x' is unknown: use one of burst, gsm8k, humaneval, livebench, osc"),
        (load_session_card, "trace='x' is unknown: use one of dureader, gaia, hotpotqa, toolbench"),
        (load_conversation_card, "dataset='x' is no set of conversations: use one of lmsys-chat-1m, sharegpt"),
    ):
        with pytest.raises(UserError) as caught:
            load("x")
        assert str(caught.value) == message
        with pytest.raises(UserError, match="no cards in"):
            load("osc", tmp_path)


def test_a_card_has_the_name_of_its_file(tmp_path):
    (tmp_path / "other.yaml").write_text((CARDS_DIR / "osc.yaml").read_text(encoding="utf-8"))
    with pytest.raises(UserError, match=r"other.yaml: name='osc' must be the file's own name, 'other'"):
        load_card("other", tmp_path)
    (tmp_path / "other.yaml").write_text("a: [")
    with pytest.raises(UserError, match=r"other\.yaml is not YAML"):
        load_card("OTHER", tmp_path)


def raw_card(name: str) -> dict[str, Any]:
    return yaml.safe_load((DATASETS / f"{name}.yaml").read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    ("name", "place", "value", "message"),
    [
        ("burst", "colour", "red", ": unknown key colour: use only name, title, summary"),
        ("burst", "licence", ..., ": missing key licence"),
        ("burst", "hub.branch", "main", ": hub: unknown key branch: use only id, config, split, revision, note"),
        ("burst", "hub.id", None, ": hub: id=None must be a text"),
        ("burst", "hub", None, ": hub must be a mapping"),
        ("burst", "columns.prompt", "text", ": columns: give either prompt or prompt_tokens"),
        ("burst", "embedded.lengths.mu", 5.0, "sigma=1.0629 do not follow from the statistics: put mu: 5.8665"),
        ("burst", "embedded.lengths.low", 2.5, "low=2.5 must be a whole number"),
        ("burst", "embedded.lengths.low", 0, "low=0 must be at least 1"),
        ("burst", "embedded.lengths.high", 1, "high=1: need offset=0 < low <= high"),
        ("burst", "embedded.lengths.offset", 9999, "need offset=9999 < low <= high"),
        ("burst", "embedded.lengths.distribution", "zipf", "distribution must be one of lognormal, empirical"),
        ("burst", "embedded.lengths.distribution", ["x"], "distribution must be one of lognormal, empirical"),
        ("burst", "embedded.statistics", {"mean": "many"}, "statistics: mean='many' must be a number"),
        ("burst", "embedded.statistics", [3], "statistics must be a mapping"),
        ("burst", "embedded.text", "poem", "text='poem' is unknown: use one of coding, post"),
        ("burst", "embedded.basis", "guessed", "basis='guessed' is unknown: use one of fitted, assumed"),
        ("burst", "local", [{"path": "x", "format": "parquet"}], "format='parquet' is unknown: use one of trace"),
        ("burst", "local", [{"path": "x", "format": "lengths_csv"}], "column goes with format lengths_csv"),
        ("burst", "filter", {"column": "a", "values": [1]}, ": filter: values[0]=1 must be a text"),
        ("burst", "defects", "none", ": defects must be a list"),
        ("burst", "title", "", ": title='' must be a text that is not empty"),
        ("sessions/gaia", "lengths.counted", "per_token", "counted='per_token'"),
        ("sessions/gaia", "lengths.prefill_tokens", -3, "prefill_tokens=-3"),
        ("sessions/gaia", "rounds.kind", "normal", "kind='normal'"),
        ("sessions/gaia", "rounds.mean", 0.5, "mean=0.5"),
        ("sessions/gaia", "rounds.kind", "poisson", "goes with kind negative_binomial"),
        ("sessions/gaia", "environment.delay_mean_s", -1, "delay_mean_s=-1"),
        ("sessions/gaia", "environment.delay_mean_s", 1e300, "delay_mean_s=1e+300 is more than 1,000,000"),
        ("sessions/gaia", "local", [{"path": "x", "format": "burstgpt_csv"}], "format='burstgpt_csv' is unknown"),
        ("sessions/gaia", "roles", {"rounds.mean": "guessed"}, "'guessed' is unknown: use one of stated"),
        ("sessions/gaia", "roles", {"rounds.extra": "stated"}, "roles must name every number once"),
        ("conversations/sharegpt", "turns.mean", 0.5, "turns: mean=0.5"),
        ("conversations/sharegpt", "first.short_share", 1.2, "short_share=1.2"),
        ("conversations/sharegpt", "first.long_share", 0.4, "their sum must be below 1"),
        ("conversations/sharegpt", "answers.sigma", 0, "answers: sigma=0"),
        ("conversations/sharegpt", "bounds.low", 300, "bounds: low=300"),
        ("conversations/sharegpt", "later.middle", 1, "unknown key middle"),
        ("conversations/sharegpt", "title", 3, "title=3 must be a text"),
    ],
)
def test_cards_are_read_strictly(name, place, value, message, tmp_path):
    raw = raw_card(name)
    *way, key = place.split(".")
    section = raw
    for each in way:
        section = section[each]
    section[key] = section[key] | value if key == "roles" and isinstance(value, dict) else value
    if value is ...:
        del section[key]
    path = tmp_path / f"{Path(name).name}.yaml"
    path.write_text(yaml.safe_dump(raw), encoding="utf-8")
    with pytest.raises(UserError) as caught:
        LOADERS[name](path.stem, tmp_path)
    assert message in str(caught.value)
