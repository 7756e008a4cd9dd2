"""Platforms of the package and of a user's file go through one reader, which refuses what it does not know."""

from dataclasses import replace

import pytest
from support.tables import data_beside

from engines.errors import UserError
from repro.families.platforms import PLATFORMS, DllmPart, PrefillPart, checked_section, platform

DATA = data_beside(__file__, "platforms")


def test_every_platform_is_read_and_has_a_card_or_measures():
    found = {name: platform(name) for name in PLATFORMS}
    assert all(each.name == name and each.title for name, each in found.items())
    assert {each.executor for each in found.values() if each.gpu is None} == {"torch", "http"}
    assert {each.executor for each in found.values() if each.gpu is not None} == {"roofline"}


def test_a_part_has_the_memory_and_the_card_of_its_platform():
    where = platform("h200")
    assert where.part(DllmPart).memory_bytes == 141 * 10**9
    assert where.part(PrefillPart).gpu == "h200"
    with pytest.raises(UserError, match=r"platform='endpoint'.*cpu-tiny"):
        platform("endpoint").part(PrefillPart)


def test_requests_follow_the_rate_where_a_platform_says_for_how_long_they_arrive():
    part = platform("h200").part(DllmPart)
    lasting = replace(part, load_s=4.0)
    assert [lasting.requests_at(rate) for rate in (0.5, 2.0, 2.5)] == [8, 8, 10]
    assert replace(part, load_s=None).requests_at(2.5) is None


@pytest.mark.parametrize(("family", "given", "says"), DATA["sections"])
def test_a_section_names_what_is_wrong_in_it(family, given, says):
    with pytest.raises(UserError, match=says):
        checked_section(family, given)


@pytest.mark.parametrize("name", ["nosuch", 3])
def test_a_name_that_is_none_is_told_all_there_are(name):
    with pytest.raises(UserError, match=", ".join(PLATFORMS)):
        platform(name)
