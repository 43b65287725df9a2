"""An error by its type and its fields; its text is built in one place, and tested there."""

import re
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from embershard.proto.errors import EmbershardError


@contextmanager
def raises(error: type[EmbershardError], **fields: object) -> Iterator[None]:
    """The block raises the error; `fields` are values, or patterns found in them, and `shard` is who raised it."""
    with pytest.raises(error) as caught:
        yield
    found = {**caught.value.fields, "shard": caught.value.shard}
    for name, want in fields.items():
        fits = want.search(str(found[name])) if isinstance(want, re.Pattern) else found[name] == want
        assert fits, (name, found[name], want)
