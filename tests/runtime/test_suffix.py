"""Drafts by suffixes: the plain twin of the native search, what is kept, and for whom."""

from collections import Counter
from typing import Any

import numpy as np
import pytest

from quire.core.draft_tree import ROOT, DraftTree
from quire.core.params import SamplingParams
from quire.core.plan import Admission
from quire.ops.compiled import native
from quire.runtime.spec import suffix as suffix_module
from quire.runtime.spec.config import read_config
from quire.runtime.spec.suffix import Suffix

BORDER = -1
MAX_MATCHES = 48  # as in native/src/token_history.cpp


def proposer(**keys: float) -> Suffix:
    config = read_config(None, "suffix")
    assert config is not None
    context: Any = None
    return Suffix(context, 8, **{**config.methods[0].keys, **keys})  # type: ignore[arg-type]


def admit(one: Suffix, row: int, num_prompt: int, tenant: str = "") -> None:
    one.admit(Admission(row, SamplingParams(), 0, [], num_prompt, [], [], namespace=(tenant, "", "")))


def propose(one: Suffix, row: int, *tokens: int, count: int = 8) -> list[int]:
    tree = one.propose({row: np.array(tokens, np.int32)}, {row: count}).get(row, DraftTree([]))
    assert not tree.parents
    return tree.tokens


def history(*texts: list[int]) -> Any:
    made = native.TokenHistory(1 << 12)
    for text in texts:
        made.append(np.array(text, np.int32))
    return made


def plain_matches(text: list[int], last: list[int], most: int) -> list[tuple[int, int]]:
    found = []
    for end in range(len(text) - 2, 0, -1):
        length = 0
        while length < min(len(last), most) and length <= end and text[end - length] == last[-1 - length] != BORDER:
            length += 1
        if length >= 2:
            found.append((end + 1, length))
    return sorted(found[:MAX_MATCHES], key=lambda match: -match[1])


def plain_best(
    text: list[int], own: bool, last: list[int], rules: tuple[int, int, float, float]
) -> tuple[float, list[int]]:
    most_tokens, most_length, factor, least = rules
    matches, best = plain_matches(text, last, most_length), (0.0, list[int]())
    for length in sorted({length for _, length in matches}, reverse=True):
        alive, drafts, probability, score = [at for at, of in matches if of >= length], list[int](), 1.0, 0.0
        while len(drafts) < min(most_tokens, max(1, int(factor * length))):
            whole = text + drafts if own else text
            votes = Counter(whole[at] for at in alive if at < len(whole) and whole[at] != BORDER)
            if not votes:
                break
            token, count = votes.most_common(1)[0]  # of equals the one met first
            probability *= count / len(alive)
            if probability < least:
                break
            alive = [at + 1 for at in alive if at < len(whole) and whole[at] == token]
            drafts.append(token)
            score += probability
        if score > best[0] + 1e-9:
            best = (score, drafts)
    return best


def test_drafts_are_those_of_a_plain_search() -> None:
    chance = np.random.default_rng(0)
    longest = 0
    for _ in range(400):
        vocab = int(chance.integers(2, 6))
        own = chance.integers(0, vocab, size=chance.integers(1, 60)).tolist()
        shared = [BORDER, *chance.integers(0, vocab, size=40).tolist(), BORDER, *own[: len(own) // 2], 1, 0, 1]
        rules = (int(chance.integers(1, 9)), int(chance.integers(2, 9)), float(chance.choice([0.5, 1.0, 2.0])), 0.1)
        last = own[-rules[1] :]
        score, expected = plain_best(own, True, last, rules)
        others = plain_best(shared, False, last, rules)
        if others[0] > score + 1e-9:
            expected = others[1]
        found = native.suffix_drafts(history(own), history(shared), *rules)
        assert found == expected
        longest = max(longest, len(found))
    assert longest == 8


Nodes = list[tuple[int, int, float]]  # (token, parent, confidence)


def plain_tree(
    text: list[int], own: bool, last: list[int], max_nodes: int, rules: tuple[int, int, float, float]
) -> tuple[float, Nodes]:
    """The likeliest continuations of every length of match, one after the other."""
    most_tokens, most_length, factor, least = rules
    matches = plain_matches(text, last, most_length)
    best: tuple[float, Nodes] = (0.0, [])
    for length in sorted({length for _, length in matches}, reverse=True):
        limit = min(most_tokens, max(1, int(factor * length)))
        nodes: Nodes = []
        score, waiting = 0.0, [(1.0, 1.0, ROOT, list[int](), [at for at, of in matches if of >= length])]
        while waiting and len(nodes) < max_nodes:
            chosen = max(waiting, key=lambda one: one[0])  # of equals the one met first
            waiting.remove(chosen)
            probability, confidence, parent, path, alive = chosen
            if path:
                nodes.append((path[-1], parent, confidence))
                score += probability
            whole = text + path if own else text
            follows = Counter(whole[at] for at in alive if at < len(whole) and whole[at] != BORDER)
            for token, votes in follows.items() if len(path) < limit else ():
                share = votes / len(alive)
                if probability * share >= least:
                    behind = [at + 1 for at in alive if at < len(whole) and whole[at] == token]
                    waiting.append((probability * share, share, len(nodes) - 1, [*path, token], behind))
        if score > best[0] + 1e-9:
            best = (score, nodes)
    return best


def test_trees_are_those_of_a_plain_search() -> None:
    chance = np.random.default_rng(1)
    branched = 0
    for _ in range(300):
        vocab = int(chance.integers(2, 6))
        own = chance.integers(0, vocab, size=chance.integers(1, 60)).tolist()
        shared = [BORDER, *chance.integers(0, vocab, size=40).tolist(), BORDER, *own[: len(own) // 2], 1, 0, 1]
        rules = (int(chance.integers(1, 7)), int(chance.integers(2, 9)), float(chance.choice([0.5, 1.0, 2.0])), 0.1)
        max_nodes, last = int(chance.integers(2, 20)), own[-rules[1] :]
        score, expected = plain_tree(own, True, last, max_nodes, rules)
        others = plain_tree(shared, False, last, max_nodes, rules)
        if others[0] > score + 1e-9:
            score, expected = others
        tokens, parents, confidences = native.suffix_tree(history(own), history(shared), max_nodes, *rules)
        assert list(zip(tokens, parents, confidences, strict=True)) == expected
        branched += parents != list(range(ROOT, len(parents) - 1))
    assert branched > 100


def test_a_tree_has_all_that_was_likely() -> None:
    one = proposer(suffix_decoding_max_spec_factor=4.0, tree_nodes=12)
    admit(one, 0, 4)
    text = [1, 2, 7, 7, 1, 2, 8, 5, 1, 2, 8, 6, 1, 2]
    tree = one.propose({0: np.array(text, np.int32)}, {0: 2})[0]
    assert tree.tokens[:2] == [8, 7] and tree.parents[:2] == [ROOT, ROOT] and len(tree.tokens) == 5
    assert tree.confidences[:2] == [2 / 3, 1 / 3]
    assert sorted(zip(tree.tokens[2:], tree.parents[2:], strict=True)) == [(5, 0), (6, 0), (7, 1)]


def test_what_most_continued_with_is_proposed() -> None:
    one = proposer(suffix_decoding_max_spec_factor=4.0, suffix_decoding_min_token_prob=0.5)
    admit(one, 0, 4)
    text = [1, 2, 7, 7, 1, 2, 8, 5, 1, 2, 8, 6, 1, 2]
    assert propose(one, 0, *text) == [8]  # two of three; what follows that is less than even


def test_a_pattern_goes_on() -> None:
    one = proposer()
    admit(one, 0, 2)
    assert propose(one, 0, 4, 5, 6, 4, 5, 6, 4, 5, 6, count=5) == [4, 5, 6, 4, 5]


def test_answers_are_found_by_later_requests_and_prompts_are_not() -> None:
    one = proposer()
    admit(one, 0, 3)
    propose(one, 0, 1, 2, 3, 11, 12)
    propose(one, 0, 1, 2, 3, 11, 12, 13, 14)
    one.retire(0)
    admit(one, 0, 2)
    assert propose(one, 0, 1, 2) == []
    assert propose(one, 0, 1, 2, 11, 12) == [13, 14]
    admit(one, 1, 2, tenant="another")
    assert propose(one, 1, 1, 2, 11, 12) == []


def test_no_answer_is_kept_where_none_may_be() -> None:
    one = proposer(suffix_decoding_max_cached_requests=0)
    admit(one, 0, 1)
    propose(one, 0, 1, 11, 12, 13)
    one.retire(0)
    admit(one, 0, 1)
    assert propose(one, 0, 1, 11, 12) == []


def test_the_oldest_answers_go_first() -> None:
    one = proposer(suffix_decoding_max_cached_requests=2)
    for answer in ([11, 12, 13], [21, 22, 23], [31, 32, 33]):
        admit(one, 0, 1)
        propose(one, 0, 1, *answer)
        one.retire(0)
    for begins, expected in (([11, 12], []), ([21, 22], [23]), ([31, 32], [33])):
        admit(one, 0, 1)
        assert propose(one, 0, 1, *begins) == expected


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suffix_module, "MAX_ANSWERS", 1 << 10)
    monkeypatch.setattr(suffix_module, "MAX_NAMESPACES", 3)
    one = proposer()
    for number in range(40):
        admit(one, 0, 1, tenant=str(number % 5))
        propose(one, 0, *range(700))
        one.retire(0)
    assert [*one._answers] == [("2", "", ""), ("3", "", ""), ("4", "", "")]
    assert all(answers.history.num_bytes < 12 * (1 << 10) + 100 for answers in one._answers.values())
    admit(one, 0, 1, tenant="4")
    assert propose(one, 0, 0, 690, 691, 692)[:2] == [693, 694]  # the newest are found in a ring that went round


def test_a_long_text_of_one_token_is_no_trouble() -> None:
    made = native.TokenHistory(1 << 16)
    made.append(np.zeros(100_000, np.int32))
    assert native.suffix_drafts(made, None, 8, 24, 1.0, 0.1) == [0] * 8
