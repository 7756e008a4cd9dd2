"""The family of endpoints."""

from __future__ import annotations

from repro.runs.family import Family, Shown
from repro.systems.http.columns import CHUNK_COLUMNS, CHUNKS, REQUEST_COLUMNS
from repro.systems.http.metrics import HTTP_METRICS
from repro.systems.http.validity import HTTP_CHECKS

HTTP = Family(
    name="http",
    request_columns=REQUEST_COLUMNS,
    tables={CHUNKS: CHUNK_COLUMNS},
    metrics=HTTP_METRICS,
    checks=HTTP_CHECKS,
    shown=(
        Shown("in tok", "input_len", stat="mean"),
        Shown("out tok", "output_len", stat="mean"),
        Shown("ttft ms", "ttft_s", stat="mean", scale=1e3),
        Shown("tpot ms", "tpot_s", stat="mean", scale=1e3),
        Shown("itl ms", "itl_s", stat="mean", scale=1e3),
        Shown("goodput/s", "goodput_http", stat="requests_s"),
        Shown("sent req/s", "achieved_rate"),
        Shown("at once", "peak_concurrency"),
    ),
)
