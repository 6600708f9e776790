import pytest

from quire.core.errors import BadRequest
from quire.server.dialects import DIALECTS, load, reader_of, readers


@pytest.mark.parametrize("name", DIALECTS)
def test_every_dialect_can_be_loaded_and_tell_an_error(name: str) -> None:
    dialect = load(name)
    assert dialect.name == name and dialect.parsers
    error = BadRequest("what is wrong", "what to do", param="field")
    frame = dialect.wire.frame(dialect.wire.error(error))
    assert b"what is wrong" in frame and b"what to do" in frame


def test_a_path_of_two_dialects_tells_their_bodies_apart() -> None:
    shared = {path: [dialect.name for dialect, _ in several] for path, several in readers().items() if several[1:]}
    assert shared == {"/generate": ["sglang", "tgi"]}
    for body, name in (
        (b'{"text": "Hi"}', "sglang"),
        (b'{"input_ids": [[1, 2]]}', "sglang"),
        (b'{"inputs": "Hi"}', "tgi"),
        (b'{"inputs": "Hi", "text": "Hi"}', "tgi"),
        (b'{"prompt": "Hi"}', "tgi"),
        (b"[" * 100_000, "tgi"),
        (b"not JSON", "tgi"),
    ):
        assert reader_of(body, readers()["/generate"])[0].name == name, body[:40]
