"""Derives the kernel times of any model from those that a package lists for a card.

A product that is not listed reaches the same share of peak (or of bandwidth, if that bounds it) as the nearest listed products. We tested
this by leaving out each listed product from 128 rows on: the median error is 3 to 7 %, and the 90th percentile 10 to 17 %. That is a
quarter closer than a line between neighbours. Heads that are not listed lie on the line between neighbours. These have as many K/V heads,
or else as many heads to each K/V head. A decode with more K/V heads than are listed takes as long as several sequences with fewer, which
read the same bytes.
"""

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence

from engines.cost.roofline import Gpu

Curve = tuple[tuple[float, ...], tuple[float, ...]]
"""Sizes and seconds of the measured points."""
Curves = Mapping[tuple[int, ...], Curve]
"""The curves of a kernel by their keys."""
NEAREST = 4
"""How many listed products stand in for one that is not listed."""


def product_curve(product: tuple[int, ...], listed: Curves, card: Gpu) -> Curve:
    """Measured times if the product (its outputs and inputs) is listed. Otherwise times by the utilisation of the nearest products,
    weighed by inverse squared distance."""
    if product in listed:
        return listed[product]
    distances = {other: math.dist(map(math.log2, other), map(math.log2, product)) for other in listed}
    nearest = sorted(listed, key=lambda each: (distances[each], each))[:NEAREST]
    weights = [distances[other] ** -2 for other in nearest]
    rows = listed[nearest[0]][0]
    shares = [0.0] * len(rows)
    for weight, other in zip(weights, nearest, strict=True):
        for index, (size, time) in enumerate(zip(*listed[other], strict=True)):
            shares[index] += weight * _least_s(other, size, card) / time
    total = sum(weights)
    times = [_least_s(product, size, card) / (share / total) for size, share in zip(rows, shares, strict=True)]
    return rows, tuple(times)


def _least_s(product: tuple[int, ...], rows: float, card: Gpu) -> float:
    """Seconds of a product at the datasheet's peaks."""
    outputs, inputs = product
    num_bytes = 2 * (outputs * inputs + rows * (outputs + inputs))
    return max(2 * rows * outputs * inputs / card.peak_flops, num_bytes / card.bandwidth)


def attention_curves(heads: int, kv_heads: int, listed: Curves, *, is_decode: bool) -> Mapping[float, Curve]:
    """Curves by batch; ``listed`` has keys of heads, K/V heads and batch. Empty if no listed curve tells how long the heads take."""
    curves = between(heads, kv_heads, listed)
    if curves or not is_decode:
        return curves
    for fewer in range(kv_heads - 1, 0, -1):
        if kv_heads % fewer == 0 and (curves := between(heads * fewer // kv_heads, fewer, listed)):
            # Batches between the listed ones are found later.
            return {batch * fewer / kv_heads: curve for batch, curve in curves.items()}
    return {}


def between(heads: int, kv_heads: int, listed: Curves, *, by_ratio: bool = True) -> dict[float, Curve]:
    """Curves by batch, as listed or on the line between listed heads."""
    keys_of = {h: (h, kv) for h, kv, _ in listed if kv == kv_heads}
    neighbours = _ends(sorted(keys_of), heads)
    if not neighbours and by_ratio:
        keys_of = {h: (h, kv) for h, kv, _ in listed if h * kv_heads == kv * heads}
        neighbours = _ends(sorted(keys_of), heads)
    batches = sorted({key[2] for key in listed})
    curves_by_batch: dict[float, Curve] = {}
    for batch in batches:
        curves = [(share, listed[*keys_of[h], batch]) for h, share in neighbours if (*keys_of[h], batch) in listed]
        if curves and len(curves) == len(neighbours) and (curve := _mix_curves(curves))[0]:
            curves_by_batch[batch] = curve
    return curves_by_batch


def _ends(listed: Sequence[int], value: int) -> list[tuple[int, float]]:
    """The listed values beside ``value``, or ``value`` itself, with the share of each; empty beyond the listed values."""
    index = bisect_left(listed, value)
    if index < len(listed) and listed[index] == value:
        return [(value, 1.0)]
    if not 0 < index < len(listed):
        return []
    low, high = listed[index - 1], listed[index]
    share = (value - low) / (high - low)
    return [(low, 1 - share), (high, share)]


def _mix_curves(curves: Sequence[tuple[float, Curve]]) -> Curve:
    """The sum of the curves by their shares, at the sizes that all curves have."""
    seconds_by_size = [(share, dict(zip(*curve, strict=True))) for share, curve in curves]
    sizes = tuple(size for size in curves[0][1][0] if all(size in times for _, times in seconds_by_size))
    return sizes, tuple(sum(share * times[size] for share, times in seconds_by_size) for size in sizes)
