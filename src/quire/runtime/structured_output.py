"""Structured output: which tokens each row may sample next."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from quire.core.draft_tree import DraftTree, path_to
from quire.core.params import SamplingParams
from quire.core.plan import Admission
from quire.core.structured import Structured
from quire.ops.opset import Masks
from quire.runtime.matcher import Matcher
from quire.runtime.reasoning_matcher import ReasoningMatcher
from quire.runtime.thinking_matcher import ThinkingMatcher

NO_DRAFTS: Mapping[int, Sequence[int]] = {}  # nor parents
MatcherFactory = Callable[[Structured], Matcher]  # a matcher at the start of a grammar that has been compiled


@dataclass(slots=True)
class _MatchedRow:
    """A matcher and all output tokens of its row: draft tokens may leave a matcher in a state it cannot roll back."""

    matcher: Matcher
    params: SamplingParams
    tokens: list[int]


class StructuredOutputRows:
    """The matchers of rows. A row that is admitted with output tokens has them replayed, so preemption and resumption
    change nothing."""

    def __init__(self, vocab: int, new_matcher: MatcherFactory) -> None:
        self._num_words = -(-vocab // 32)
        self._new_matcher = new_matcher
        self._rows: dict[int, _MatchedRow] = {}

    def admit(self, admission: Admission) -> None:
        params, tokens = admission.params, admission.tokens[admission.num_prompt :]
        if params.needs_masks:
            self._rows[admission.row] = _MatchedRow(self._replay(params, tokens), params, tokens)

    def retire(self, row: int) -> None:
        self._rows.pop(row, None)

    def advance(self, row: int, tokens: Sequence[int]) -> None:
        if row in self._rows and tokens:
            self._rows[row].matcher.advance(tokens)
            self._rows[row].tokens += tokens

    def error(self, row: int) -> str:
        """Why no token can be sampled for a row; empty while one can."""
        return self._rows[row].matcher.error if row in self._rows else ""

    def valid_drafts(self, row: int, tree: DraftTree) -> DraftTree:
        """The draft tokens that the row's grammar allows."""
        if row not in self._rows:
            return tree
        matcher, drafts = self._rows[row].matcher, tree.tokens
        if not tree.parents:
            return tree.keep(range(matcher.count_valid(drafts)))
        paths = [path_to(tree.parents, node) for node in range(len(drafts))]
        return tree.keep([path[-1] for path in paths if matcher.count_valid([drafts[n] for n in path]) == len(path)])

    def any_matched(self, rows: Iterable[int]) -> bool:
        """Whether one of them has a matcher."""
        return not self._rows.keys().isdisjoint(rows)

    def masks(
        self,
        rows: Sequence[int],
        drafts: Mapping[int, Sequence[int]] = NO_DRAFTS,
        parents: Mapping[int, Sequence[int]] = NO_DRAFTS,
    ) -> Masks | None:
        """For the rows that sample, a mask for each line of logits; None if no row has a matcher. A row with draft
        tokens has one more line behind each of them. Those of a row with parents are a tree."""
        lines: list[int] = []
        line = 0
        for row in rows:
            end = line + 1 + len(drafts.get(row, ()))
            if row in self._rows:
                lines += range(line, end)
            line = end
        if not lines:
            return None
        masks = _MaskBuffer(len(lines), self._num_words)
        for row in rows:
            if (matched := self._rows.get(row)) is not None:
                if row in parents:
                    self._write_tree(matched, drafts[row], parents[row], masks)
                else:
                    self._write(matched, drafts.get(row, ()), masks)
        return Masks(lines, masks.bits)

    def _write(self, matched: _MatchedRow, drafts: Sequence[int], masks: "_MaskBuffer") -> None:
        """One mask, and one more behind each draft token. The matcher ends in the state it began in."""
        matcher = matched.matcher
        masks.add(matcher)
        for count, draft in enumerate(drafts, 1):
            matcher.advance([draft])
            if not masks.add(matcher):
                matched.matcher = self._replay(matched.params, matched.tokens)
                masks.skip(len(drafts) - count)  # the lines behind a token that cannot be sampled are not used
                return
        if drafts:
            matcher.rollback(len(drafts))

    def _write_tree(
        self, matched: _MatchedRow, drafts: Sequence[int], parents: Sequence[int], masks: "_MaskBuffer"
    ) -> None:
        """One mask, and one more behind each node of a tree."""
        masks.add(matched.matcher)
        for node in range(len(drafts)):
            path = path_to(parents, node)
            matched.matcher.advance([drafts[n] for n in path])
            if masks.add(matched.matcher):
                matched.matcher.rollback(len(path))
            else:
                matched.matcher = self._replay(matched.params, matched.tokens)

    def _replay(self, params: SamplingParams, tokens: Sequence[int]) -> Matcher:
        matcher = self._matcher_of(params)
        matcher.advance(tokens)
        return matcher

    def _matcher_of(self, params: SamplingParams) -> Matcher:
        """At the start of a completion."""
        if params.structured is None:
            assert params.thinking is not None
            return ThinkingMatcher(params.thinking)
        answer = self._new_matcher(params.structured)
        return answer if params.thinking is None else ReasoningMatcher(params.thinking, answer)


class _MaskBuffer:
    """Masks, written line after line."""

    def __init__(self, num_lines: int, num_words: int) -> None:
        self.bits: NDArray[np.uint32] = np.empty((num_lines, num_words), np.uint32)
        self._line, self._address, self._line_bytes = 0, self.bits.ctypes.data, 4 * num_words

    def add(self, matcher: Matcher) -> bool:
        """False: the matcher has an error, which allows no token."""
        written = not matcher.error and matcher.write_mask(
            self._address + self._line * self._line_bytes, self._line_bytes
        )
        if not written:
            self.bits[self._line] = 0
        self._line += 1
        return written

    def skip(self, count: int) -> None:
        self.bits[self._line : self._line + count] = 0
        self._line += count
