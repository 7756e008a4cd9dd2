"""The committed tables: their size, where they come from, single measured times; what is missing is refused by name."""

import gzip

import pytest
from support.refusals import refuses

from engines.cost.kernels import FOLDER, FRAMEWORKS, KEYS, cards, digest_of, encoded, load_tables, write_tables
from engines.errors import UserError


def test_every_card_has_every_table_of_every_framework_and_all_are_below_a_megabyte():
    assert cards() == ["a100", "b200", "h100", "h200", "l40s"]
    assert sum(path.stat().st_size for path in FOLDER.iterdir()) < 10**6
    for card in cards():
        tables = load_tables(card)
        assert set(tables.curves) == {(framework, kernel) for framework in FRAMEWORKS for kernel in KEYS}


def test_a_table_says_where_it_is_from():
    about = load_tables("h200").about
    assert (about["package"], about["version"], about["system"]) == ("aiconfigurator-core", "0.12.0", "h200_sxm")
    assert about["licence"].startswith("Apache-2.0")
    assert all(len(digest) == 64 for digest in about["files"].values())
    assert about["rules"]["vllm"]["products"] == 483 * 74


@pytest.mark.parametrize(
    ("kernel", "key", "size", "milliseconds"),
    [
        # As they stand in the package: h200_sxm/gemm/vllm/0.24.0, m = 512, and so on.
        ("gemm", (12288, 4096), 512, 0.063819),
        ("gemm", (4096, 4096), 2048, 0.084362),
        ("gemm", (4096, 12288), 1, 0.029684),
        ("prompt", (32, 32, 1), 1024, 0.045211),
        ("prompt", (32, 32, 8), 512, 0.121285),
    ],
)
def test_a_listed_time_is_the_measured_one(kernel, key, size, milliseconds):
    sizes, times = load_tables("h200").curve("vllm", kernel, key)
    assert 1e3 * times[sizes.index(size)] == pytest.approx(milliseconds, rel=5e-4)


def test_what_is_written_is_read_again(tmp_path):
    curves = {("vllm", "gemm"): {(8, 4): ((1.0, 2.0, 1048577.0), (1e-6, 2e-6, 3.456e-3)), (4, 4): ((2.0,), (5e-6,))}}
    content = encoded({"card": "mine"}, curves)
    write_tables(tmp_path / "mine.csv.gz", content)
    found = load_tables("mine", tmp_path)
    assert found.about == {"card": "mine"}
    assert found.digest == digest_of(content) == digest_of(gzip.decompress((tmp_path / "mine.csv.gz").read_bytes()))
    sizes, times = found.curve("vllm", "gemm", (8, 4))
    assert sizes == (1.0, 2.0, 1048577.0)
    assert times == pytest.approx((1e-6, 2e-6, 3.456e-3))
    assert found.curve("vllm", "gemm", (4, 4)) == ((2.0,), (pytest.approx(5e-6),))


def test_what_is_missing_is_refused_by_name(tmp_path):
    with refuses("card='h20'"):
        load_tables("h20")
    tables = load_tables("h200")
    with pytest.raises(UserError, match="no gemm of outputs=7, inputs=9 in its table of h200: extract it with"):
        tables.curve("vllm", "gemm", (7, 9))
    write_tables(tmp_path / "mine.csv.gz", encoded({}, {("vllm", "gemm"): {(8, 4): ((1.0,), (1e-6,))}}))
    with refuses("kernels='sglang'"):
        load_tables("mine", tmp_path).curve("sglang", "gemm", (8, 4))
    with pytest.raises(UserError, match="no experts table of mine: use one of cost=roofline"):
        load_tables("mine", tmp_path).of("vllm", "experts")
