"""How JSON is written: what a request says, and what the server says where it does not."""

import pytest

from quire.core.errors import BadRequest
from quire.core.structured import Structured
from quire.core.structured_defaults import StructuredDefaults
from quire.engine.options import EngineOptions


def test_a_server_decides_what_a_request_leaves_open() -> None:
    config = {"disable_any_whitespace": True, "disable_additional_properties": True, "backend": "guidance"}
    defaults = EngineOptions.of({"structured_outputs_config": config}).structured_defaults
    assert defaults == StructuredDefaults("", True)
    assert Structured("json").with_defaults(defaults) == Structured("json", "", "", True)
    asked = Structured.of(json={}, whitespace_pattern=" ?", disable_additional_properties=False)
    assert asked is not None and asked.with_defaults(defaults) == asked
    assert StructuredDefaults.of('{"whitespace_pattern": "[ \\\\n]*"}').whitespace_pattern == r"[ \n]*"
    assert StructuredDefaults.of('{"enable_in_reasoning": true}').enable_in_reasoning
    assert EngineOptions().structured_defaults == StructuredDefaults()


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ("{", "not JSON"),
        ("[1]", "not a JSON object"),
        ('{"backend": "xgrammar"}', "backend `xgrammar`.*guidance"),
        ('{"disable_any_whitespace": 1}', "disable_any_whitespace is 1"),
        ('{"enable_in_reasoning": "no"}', 'enable_in_reasoning is "no"'),
        ('{"any_whitespace": true}', "has `any_whitespace`.*whitespace_pattern"),
        ('{"whitespace_pattern": "x"}', "more than white space"),
    ],
)
def test_a_wrong_config_is_refused(config: str, words: str) -> None:
    with pytest.raises(BadRequest, match=words.replace(".*", r"[\s\S]*")):
        EngineOptions(structured_outputs_config=config)


@pytest.mark.parametrize("pattern", ["", " ", "[ ]?", r"[\n\t ]*", r"\s{0,4}", r"(?: |\n{1,2}[ \t]{0,20})?", r"\x20+"])
def test_white_space_patterns(pattern: str) -> None:
    structured = Structured.of(json={}, whitespace_pattern=pattern)
    assert structured is not None and structured.whitespace_pattern == pattern


@pytest.mark.parametrize("pattern", ["a", ".", "[^a]", r"\S", "5", "[0-9]", "[*]", " " * 201, r"[\s\S]", ","])
def test_a_pattern_with_more_than_white_space_is_refused(pattern: str) -> None:
    """What stands between the elements of JSON would not be JSON."""
    with pytest.raises(BadRequest, match="whitespace_pattern"):
        Structured.of(json={}, whitespace_pattern=pattern)
