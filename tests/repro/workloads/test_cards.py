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
from support.tables import data_beside

from engines.errors import UserError
from repro.paths import DATASETS
from repro.workloads.card import Card, introductions
from repro.workloads.conversations import known_conversation_cards, load_conversation_card
from repro.workloads.dataset import CARDS_DIR, known_datasets, load_card
from repro.workloads.draws import LogNormalLengths, derive_seed, fit_statistics
from repro.workloads.sessions import known_session_cards, load_session_card

REFUSED = data_beside(__file__, "refused")

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


@pytest.mark.parametrize(("text", "said"), REFUSED["cards_without_names"])
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
    for statistics in (
        {"mean": true_mean, "std": true_std},
        {"mean": true_mean, "median": math.exp(mu)},
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


def test_log_normal_draws_stay_in_bounds_and_reach_them():
    dist = LogNormalLengths(mu=5.0, sigma=1.0, low=100, high=300)
    draws = dist.draw(2000, np.random.default_rng(0))
    assert (draws.min(), draws.max()) == (100, 300)
    assert (draws == 300).mean() == pytest.approx(0.2407, abs=4 * math.sqrt(0.24 * 0.76 / 2000))


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


@pytest.mark.parametrize(("name", "place", "value", "message"), REFUSED["cards"])
def test_cards_are_read_strictly(name, place, value, message, tmp_path):
    raw = raw_card(name)
    *way, key = place.split(".")
    section = raw
    for each in way:
        section = section[each]
    section[key] = section[key] | value if key == "roles" and isinstance(value, dict) else value
    if value == "(absent)":
        del section[key]
    path = tmp_path / f"{Path(name).name}.yaml"
    path.write_text(yaml.safe_dump(raw), encoding="utf-8")
    with pytest.raises(UserError) as caught:
        LOADERS[name](path.stem, tmp_path)
    assert message in str(caught.value)
