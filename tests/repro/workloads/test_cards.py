"""Cards of all kinds and the distributions on them, read strictly."""

import math
from dataclasses import fields
from typing import Any

import numpy as np
import pytest
import yaml
from support.tables import data_beside

from engines.errors import UserError
from repro.paths import DATASETS
from repro.workloads.card import Card, Section, introductions, parse
from repro.workloads.conversations import ConversationCard, known_conversation_cards, load_conversation_card
from repro.workloads.dataset import DatasetCard, known_datasets, load_card
from repro.workloads.draws import LogNormalLengths, derive_seed
from repro.workloads.sessions import SessionCard, known_session_cards, load_session_card

REFUSED = data_beside(__file__, "refused")

KINDS: dict[str, type[Card]] = {
    "burst": DatasetCard,
    "sessions/gaia": SessionCard,
    "conversations/sharegpt": ConversationCard,
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
    assert [card.name for card in cards] == list(known()), "a card has the name of its file"


def test_roles_name_every_number_of_a_card_once():
    for load_one, known in (
        (load_session_card, known_session_cards),
        (load_conversation_card, known_conversation_cards),
    ):
        for card in map(load_one, known()):
            sections = [(field.name, getattr(card, field.name)) for field in fields(card)]
            numbers = {
                f"{name}.{field.name}"
                for name, part in sections
                if isinstance(part, Section)
                for field in fields(part)
                if getattr(part, field.name) is not None
            }
            assert card.roles.keys() == numbers


def test_the_numbers_of_sessions_and_conversations_fit_together():
    for rounds in (load_session_card(name).rounds for name in known_session_cards()):
        assert rounds.kind != "fixed" or rounds.mean == int(rounds.mean)
        assert (rounds.kind == "negative_binomial") == (rounds.shape is not None)
    for card in map(load_conversation_card, known_conversation_cards()):
        assert all(part.short_share + part.long_share < 1 for part in (card.first, card.later))


# Length distributions ------------------------------------------------------------------------------------------------


SIGMA = {
    frozenset({"mean", "std"}): lambda s: math.sqrt(math.log1p((s["std"] / s["mean"]) ** 2)),
    frozenset({"mean", "median"}): lambda s: math.sqrt(2 * math.log(s["mean"] / s["median"])),
    frozenset({"mean", "sigma"}): lambda s: s["sigma"],
}
"""How to find sigma from the statistics given beside a mean: by the method of moments, by the median, or as given."""


@pytest.mark.parametrize("name", known_datasets())
def test_a_card_s_distribution_follows_from_its_statistics(name):
    card = load_card(name)
    lengths, statistics = card.embedded.lengths, card.embedded.statistics
    sigma = SIGMA[frozenset(statistics)](statistics)
    assert (lengths.mu, lengths.sigma) == pytest.approx((math.log(statistics["mean"]) - sigma**2 / 2, sigma), abs=5e-4)
    assert lengths.offset < lengths.low <= lengths.high
    assert (card.columns.prompt is None) != (card.columns.prompt_tokens is None)
    assert all((file.format == "lengths_csv") == (file.column is not None) for file in card.local)


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
    assert not (DATASETS / "__init__.py").exists(), "it would hide the Hugging Face library"


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


def test_unknown_names_list_the_known_ones(tmp_path, monkeypatch):
    for load, message in (
        (load_card, "dataset='x' is unknown: use one of burst, gsm8k, humaneval, livebench, osc"),
        (load_session_card, "trace='x' is unknown: use one of dureader, gaia, hotpotqa, toolbench"),
        (load_conversation_card, "dataset='x' is no set of conversations: use one of lmsys-chat-1m, sharegpt"),
    ):
        with pytest.raises(UserError) as caught:
            load("x")
        assert str(caught.value) == message
    monkeypatch.setattr("repro.workloads.card.DATASETS", tmp_path)
    for load in (load_card, load_session_card, load_conversation_card):
        with pytest.raises(UserError, match="no cards in"):
            load("y")


def raw_card(name: str) -> dict[str, Any]:
    return yaml.safe_load((DATASETS / f"{name}.yaml").read_text(encoding="utf-8"))


@pytest.mark.parametrize(("name", "place", "value", "message"), REFUSED["cards"])
def test_cards_are_read_strictly(name, place, value, message):
    raw = raw_card(name)
    *way, key = place.split(".")
    section = raw
    for each in way:
        section = section[each]
    section[key] = section[key] | value if key == "roles" and isinstance(value, dict) else value
    with pytest.raises(UserError) as caught:
        parse(KINDS[name], raw, name)
    assert message in str(caught.value)
