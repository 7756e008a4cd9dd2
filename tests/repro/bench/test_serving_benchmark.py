"""When a server's memory stays where it is."""

import pytest

pytest.importorskip("aiohttp", reason="needs the extra http: aiohttp is not installed")

from repro.bench.serving import is_flat


def rows(*sizes: tuple[float, float], lost: int = 0) -> list[dict[str, float]]:
    """Engine and server in MB, every 1,000 requests."""
    return [
        {"requests": 1000 * (i + 1), "engine_mb": engine, "server_mb": server, "lost": lost}
        for i, (engine, server) in enumerate(sizes)
    ]


@pytest.mark.parametrize(
    ("sizes", "lost", "expected"),
    [
        (((100, 50), (200, 100), (205, 104)), 0, True),
        (((100, 50), (200, 100), (211, 100)), 0, False),
        (((100, 50), (200, 100), (200, 106)), 0, False),
        (((100, 50), (200, 100), (220, 100), (200, 100)), 0, False),
        (((100, 50), (200, 100), (210, 105)), 0, True),
        (((100, 50), (200, 100), (200, 100)), 1, False),
        (((100, 50),), 0, False),
    ],
)
def test_memory_is_flat_once_it_has_settled(sizes, lost, expected):
    assert is_flat(rows(*sizes, lost=lost)) is expected
