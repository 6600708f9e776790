"""The table of docs/models.md is that of the registry and of the tests."""

from pathlib import Path

import pytest

from models.verified import PAGE, page_with, proofs_of, table
from quire.models.registry import PURPOSES

# Other spellings of what is tested.
ALIASES = {"MPTForCausalLM", "PhiMoEForCausalLM", "MiniMaxText01ForCausalLM", "MiniMaxM1ForCausalLM"}
ALIASES |= {"TeleChatForCausalLM"}


def test_the_table_of_families_is_that_of_the_tests(request: pytest.FixtureRequest) -> None:
    files = set(Path(__file__).parent.glob("test_*.py"))
    if not files <= {item.path for item in request.session.items}:
        pytest.skip("needs all of tests/models to run at once")
    proofs = list(proofs_of(request.session.items).values())
    known = {name for architectures in PURPOSES.values() for name in architectures}
    compared = {proof.subject for proof in proofs if proof.container != "quantized"}
    assert compared == known - ALIASES, "an architecture is not compared with anything"
    assert PAGE.read_text() == page_with(table(proofs)), "run `python -m tests.models.verified`, which writes the table"
