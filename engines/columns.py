"""Columns of a run's tables as arrays."""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt


class Values(Sequence[Any]):
    """Values of a column as an array [n], which numpy takes as a whole. Read one by one, ``missing`` becomes None, and i becomes
    ``names[i]`` if there are names."""

    __slots__ = ("missing", "names", "values")

    def __init__(self, values: npt.NDArray[Any], *, missing: float | None = None, names: Sequence[Any] = ()) -> None:
        self.values, self.missing, self.names = values, missing, names

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, place: Any) -> Any:
        return self._plain(self.values[place]) if isinstance(place, slice) else self._plain(self.values[[place]])[0]

    def __iter__(self) -> Iterator[Any]:
        for start in range(0, len(self), 1 << 16):
            yield from self._plain(self.values[start : start + (1 << 16)])

    def __contains__(self, value: object) -> bool:
        return bool(self.where(value).any())

    def count(self, value: object) -> int:
        return int(self.where(value).sum())

    def where(self, value: object) -> npt.NDArray[np.bool_]:
        """[n] whether each value equals ``value``."""
        if self.names:
            return np.isin(self.values, [code for code, name in enumerate(self.names) if name == value])
        if value is None:
            return self.is_missing
        return np.asarray(self.values == value, dtype=bool) & ~self.is_missing & np.ones(len(self), dtype=bool)

    def __eq__(self, other: object) -> bool:
        return list(self) == list(other) if isinstance(other, Sequence) else NotImplemented

    __hash__ = None  # type: ignore[assignment]

    def __array__(self, dtype: npt.DTypeLike | None = None, copy: bool | None = None) -> npt.NDArray[Any]:
        if self.names:
            return np.array(list(self), dtype=dtype)
        values = self.values
        if self.missing is not None and not math.isnan(self.missing):
            values = np.where(self.is_missing, np.nan, values)
        return np.asarray(values, dtype=dtype)

    def __repr__(self) -> str:
        return repr(list(self))

    @property
    def is_missing(self) -> npt.NDArray[np.bool_]:
        if self.missing is None:
            return np.zeros(len(self), dtype=bool)
        return np.isnan(self.values) if math.isnan(self.missing) else self.values == self.missing

    def _plain(self, values: npt.NDArray[Any]) -> list[Any]:
        plain: list[Any] = values.tolist()
        if self.names:
            return [self.names[code] for code in plain]
        if self.missing is not None:
            for index in np.flatnonzero(Values(values, missing=self.missing).is_missing).tolist():
                plain[index] = None
        return plain
