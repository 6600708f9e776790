from collections import Counter

import pytest

from quire.core.errors import BadRequest
from quire.server.dialects import DIALECTS, load


@pytest.mark.parametrize("name", DIALECTS)
def test_every_dialect_can_be_loaded_and_tell_an_error(name: str) -> None:
    dialect = load(name)
    assert dialect.name == name and dialect.parsers
    error = BadRequest("what is wrong", "what to do", param="field")
    frame = dialect.wire.frame(dialect.wire.error(error))
    assert b"what is wrong" in frame and b"what to do" in frame


def test_no_path_belongs_to_two_dialects() -> None:
    paths = Counter(path for name in DIALECTS for path in load(name).parsers)
    assert max(paths.values()) == 1
