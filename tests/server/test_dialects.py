from collections import Counter

import pytest

from quire.core.errors import BadRequest
from quire.server.dialects import DIALECTS, load


@pytest.mark.parametrize("name", DIALECTS)
def test_every_dialect_can_be_loaded_and_tell_an_error(name: str) -> None:
    dialect = load(name)
    assert dialect.name == name and dialect.routes
    told = dialect.frame(dialect.error(BadRequest("what is wrong", "what to do", param="field")))
    assert b"what is wrong" in told and b"what to do" in told


def test_no_path_belongs_to_two_dialects() -> None:
    paths = Counter(path for name in DIALECTS for path in load(name).routes)
    assert max(paths.values()) == 1
