"""Drafts of answers in a language: looked at beforehand and taken back, they change nothing."""

import json
import random
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from quire.core.draft_tree import DraftTree, path_to
from quire.core.params import SamplingParams
from quire.core.plan import Admission
from quire.core.structured import Structured
from quire.runtime.matcher import Matcher
from quire.runtime.structured_output import StructuredOutputRows
from quire.text.grammar.compiler import GrammarCompiler
from quire.text.tokenizers.tokenizer import Tokenizer

VOCAB = 49152
ROW = 3
DRAFT = 5  # tokens
MAX_TOKENS = 40
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "minItems": 1, "maxItems": 3},
        "next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]},
    },
    "required": ["name", "tags"],
}
LANGUAGES = {
    "json": Structured("json"),
    "schema": Structured("json_schema", json.dumps(SCHEMA)),
    "regex": Structured("regex", r"([a-z]+ )*[a-z]+\."),
    "counting": Structured("regex", "([A-Z][a-z]{1,12} ){3}é"),
    "choice": Structured.one_of(["yes", "yesterday", "näh\n", '"']),
    "recursive": Structured("grammar", 'root ::= item ("," item)*\nitem ::= [0-9] | "(" root ")"\n'),
}


@pytest.fixture(scope="module")
def tokenizer(default_model: Path) -> Tokenizer:
    return Tokenizer.load(default_model)


@pytest.fixture(scope="module")
def grammars(tokenizer: Tokenizer) -> GrammarCompiler:
    return GrammarCompiler(lambda: tokenizer, VOCAB)


class Answer:
    """One row, and a model that likes tokens at random: which ones depends on all tokens before, and on nothing
    else. It likes the end of an answer less than most."""

    def __init__(self, grammars: GrammarCompiler, structured: Structured, seed: int, ends: Sequence[int]) -> None:
        self.tokens: list[int] = []
        self.structured = StructuredOutputRows(VOCAB, self._new_matcher)
        self._grammars, self._seed, self._ends = grammars, seed, list(ends)
        params = SamplingParams(structured=structured)
        self.structured.admit(Admission(ROW, params, 0, tokens=[1, 2], num_prompt=2, blocks=[0], stop_ids=[]))

    def _new_matcher(self, structured: Structured) -> Matcher:
        self.matcher = self._grammars.matcher(structured)
        return self.matcher

    def allowed(self) -> np.ndarray:
        """[VOCAB] of bool, as the sampler would be told."""
        masks = self.structured.masks([ROW])
        assert masks is not None and masks.lines == [0]
        assert not self.structured.error(ROW), self.structured.error(ROW)
        return np.unpackbits(masks.bits.view(np.uint8)[0], bitorder="little")[:VOCAB].astype(bool)

    def liked(self, tokens: Sequence[int], allowed: np.ndarray) -> int:
        """The token after these."""
        scores = np.random.default_rng([self._seed, *tokens]).random(VOCAB)
        scores[self._ends] *= 0.9
        return int(np.where(allowed, scores, -1.0).argmax())

    @property
    def ended(self) -> bool:
        return len(self.tokens) >= MAX_TOKENS or self.tokens[-1:] in [[end] for end in self._ends]


def token_by_token(answer: Answer) -> list[int]:
    while not answer.ended:
        answer.tokens.append(answer.liked(answer.tokens, answer.allowed()))
        answer.structured.advance(ROW, answer.tokens[-1:])
    return answer.tokens


def random_draft(chance: random.Random, right: Sequence[int], ends: Sequence[int]) -> list[int]:
    """What comes next, with something else in some places, and perhaps more after it."""
    draft = list(right[:DRAFT])
    for place in range(len(draft)):
        if chance.random() < 0.2:
            draft[place] = chance.choice([chance.randrange(VOCAB), chance.choice(ends), chance.choice(draft)])
    more = [chance.randrange(VOCAB), chance.choice(ends)]
    return [*draft, *chance.sample(more, chance.randrange(2))]


@pytest.mark.parametrize("name", LANGUAGES)
def test_drafts_are_counted_as_they_would_be_taken_in(
    grammars: GrammarCompiler, tokenizer: Tokenizer, name: str
) -> None:
    chance, counts = random.Random(0), set()
    for seed in range(3):
        right = token_by_token(Answer(grammars, LANGUAGES[name], seed, tokenizer.eos_ids))
        matcher = grammars.matcher(LANGUAGES[name])
        for place in range(len(right)):
            draft = random_draft(chance, right[place:], tokenizer.eos_ids)
            other = grammars.matcher(LANGUAGES[name])
            assert other.advance(right[:place])
            taken = next((count for count, token in enumerate(draft) if not other.advance([token])), len(draft))
            before = matcher.mask()
            assert matcher.count_valid(draft) == taken
            assert matcher.mask() == before
            counts.add((taken, len(draft)))
            assert matcher.advance(right[place : place + 1])
    assert any(taken == size for taken, size in counts) and any(taken < size for taken, size in counts)


@pytest.mark.parametrize("name", LANGUAGES)
def test_what_is_taken_back_leaves_the_masks_as_they_were(
    grammars: GrammarCompiler, tokenizer: Tokenizer, name: str
) -> None:
    chance = random.Random(1)
    right = token_by_token(Answer(grammars, LANGUAGES[name], 0, tokenizer.eos_ids))
    matcher = grammars.matcher(LANGUAGES[name])
    masks = [matcher.mask()]
    for token in right[:-1]:
        assert matcher.advance([token])
        masks.append(matcher.mask())
    for _ in range(30):  # back and forth, in steps of any size
        place = chance.randrange(len(masks))
        matcher.rollback(len(masks) - 1 - place)
        assert matcher.mask() == masks[place]
        assert matcher.advance(right[place:-1])
    assert matcher.mask() == masks[-1] and not matcher.error


@pytest.mark.parametrize("name", LANGUAGES)
def test_drafted_and_verified_is_as_token_by_token(grammars: GrammarCompiler, tokenizer: Tokenizer, name: str) -> None:
    chance, num_taken, num_refused = random.Random(2), 0, 0
    for seed in range(4):
        right = token_by_token(Answer(grammars, LANGUAGES[name], seed, tokenizer.eos_ids))
        wrong = token_by_token(Answer(grammars, LANGUAGES[name], seed + 100, tokenizer.eos_ids))
        answer = Answer(grammars, LANGUAGES[name], seed, tokenizer.eos_ids)
        while not answer.ended:
            guess = chance.choice([right, wrong])
            draft = random_draft(chance, guess[len(answer.tokens) :], tokenizer.eos_ids)
            draft = draft[: answer.matcher.count_valid(draft)]
            masks = [answer.allowed()]  # for the token after each prefix of the draft
            for token in draft:
                answer.structured.advance(ROW, [token])
                masks.append(answer.allowed())
            drawn = [answer.liked(answer.tokens + draft[:count], mask) for count, mask in enumerate(masks)]
            taken = next((count for count, token in enumerate(draft) if drawn[count] != token), len(draft))
            answer.matcher.rollback(len(draft) - taken)
            answer.tokens += draft[:taken]
            if not answer.ended:
                answer.tokens.append(drawn[taken])
                answer.structured.advance(ROW, drawn[taken : taken + 1])
            num_taken, num_refused = num_taken + taken, num_refused + len(draft) - taken
        assert answer.tokens[:MAX_TOKENS] == right
    assert num_taken and num_refused


def test_the_end_of_a_text_does_not_compile_its_language_again(grammars: GrammarCompiler, tokenizer: Tokenizer) -> None:
    yes = Structured.one_of(["yes"])
    grammar = grammars.compile(yes)
    for end in tokenizer.eos_ids * 2:
        matcher = grammars.matcher(yes)
        assert matcher.advance(tokenizer.encode("yes", add_special_tokens=False)) and matcher.ended
        assert matcher.advance([end]) and not matcher.error
        assert not matcher.advance([end])
        assert grammars.find(yes) is grammar


@pytest.mark.parametrize("name", LANGUAGES)
def test_masks_behind_drafts_are_those_of_answers_with_them(
    grammars: GrammarCompiler, tokenizer: Tokenizer, name: str
) -> None:
    """And the answer stands where it stood, also where a draft is outside the language."""
    chance = random.Random(2)
    right = token_by_token(Answer(grammars, LANGUAGES[name], 0, tokenizer.eos_ids))
    answer = Answer(grammars, LANGUAGES[name], 0, tokenizer.eos_ids)
    for place in range(len(right) - 1):
        draft = random_draft(chance, right[place:], tokenizer.eos_ids)
        valid = len(answer.structured.valid_drafts(ROW, DraftTree(draft)).tokens)
        masks = answer.structured.masks([1, ROW], {ROW: draft})
        assert masks is not None and list(masks.lines) == list(range(1, 2 + len(draft)))
        for taken, found in enumerate(masks.bits):
            if taken > valid:
                assert not found.any()
            elif not {*draft[:taken]} & {*tokenizer.eos_ids}:  # nothing is drawn behind an end
                other = grammars.matcher(LANGUAGES[name])
                assert other.advance([*right[:place], *draft[:taken]])
                assert np.frombuffer(other.mask(), np.uint32, len(found)).tolist() == found.tolist()
        answer.structured.advance(ROW, right[place : place + 1])
    assert not answer.structured.error(ROW)


@pytest.mark.parametrize("name", LANGUAGES)
def test_masks_of_a_tree_are_those_of_its_paths(grammars: GrammarCompiler, tokenizer: Tokenizer, name: str) -> None:
    """And nodes that the grammar rules out are dropped, with what follows them."""
    chance = random.Random(5)
    right = token_by_token(Answer(grammars, LANGUAGES[name], 0, tokenizer.eos_ids))
    wrong = token_by_token(Answer(grammars, LANGUAGES[name], 3, tokenizer.eos_ids))
    answer = Answer(grammars, LANGUAGES[name], 0, tokenizer.eos_ids)
    for place in range(min(len(right) - 1, 12)):
        tokens = [*right[place : place + 3], *wrong[place : place + 2], chance.randrange(VOCAB)]
        tokens = [token for token in tokens if token not in tokenizer.eos_ids]  # nothing is sampled behind an end
        tree = DraftTree(tokens, [chance.randrange(-1, node) if node > 2 else node - 1 for node in range(len(tokens))])
        masks = answer.structured.masks([1, ROW], {ROW: tree.tokens}, {ROW: tree.parents})
        assert masks is not None and list(masks.lines) == list(range(1, 2 + len(tokens)))
        valid = []
        for node in range(len(tokens)):
            other, path = grammars.matcher(LANGUAGES[name]), [tokens[n] for n in path_to(tree.parents, node)]
            found = masks.bits[1 + node]
            if not other.advance([*right[:place], *path]):
                assert not found.any()
                continue
            valid.append(node)
            assert np.frombuffer(other.mask(), np.uint32, len(found)).tolist() == found.tolist()
        assert answer.structured.valid_drafts(ROW, tree) == tree.keep(valid)
        assert np.array_equal(masks.bits[0], np.frombuffer(answer.matcher.mask(), np.uint32, len(masks.bits[0])))
        answer.structured.advance(ROW, right[place : place + 1])
    assert not answer.structured.error(ROW)
