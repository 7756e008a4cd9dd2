"""Refusals by the field they name and its value: how a sentence puts them is no test's business."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from engines.errors import UserError


def names(sentence: str, said: str) -> bool:
    """Whether the field is in the sentence, and behind it its value where ``said`` is "field=value"."""
    field, _, value = said.partition("=")
    at = sentence.find(field)
    return at >= 0 and value in sentence[at + len(field) :]


@contextmanager
def refuses(said: str, error: type[Exception] = UserError) -> Iterator[pytest.ExceptionInfo[Exception]]:
    """An exception whose sentence names the field of "field=value", and the value."""
    with pytest.raises(error) as caught:
        yield caught
    assert names(str(caught.value), said), str(caught.value)
