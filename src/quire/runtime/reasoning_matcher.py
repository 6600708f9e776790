"""Free reasoning before structured output, as one matcher."""

import ctypes
from collections.abc import Sequence

from quire.core.thinking import Thinking
from quire.runtime.matcher import Matcher
from quire.runtime.thinking_matcher import ThinkingMatcher


class ReasoningMatcher:
    """A `Matcher`: reasoning, in which any token may follow, and behind its end an answer that `answer` holds to a
    grammar. Where reasoning has not begun, the first token begins it or is the answer's."""

    def __init__(self, thinking: Thinking, answer: Matcher) -> None:
        self._begin_id = thinking.begin_id
        self._reasoning, self._num_reasoning = ThinkingMatcher(thinking), 0  # tokens that it consumed
        self._answer, self._num_answer = answer, 0

    @property
    def error(self) -> str:
        return self._answer.error

    def write_mask(self, address: int, num_bytes: int) -> bool:
        if self._reasoning.inside:
            return self._reasoning.write_mask(address, num_bytes)
        written = self._answer.write_mask(address, num_bytes)
        if written and self._may_begin:
            byte, bit = divmod(self._begin_id, 8)
            ctypes.c_uint8.from_address(address + byte).value |= 1 << bit
        return written

    def advance(self, tokens: Sequence[int]) -> bool:
        rest = tokens[self._advance_reasoning(tokens) :]
        self._num_answer += len(rest)
        return not rest or self._answer.advance(rest)

    def count_valid(self, tokens: Sequence[int]) -> int:
        count = self._advance_reasoning(tokens)
        self._rollback_reasoning(count)
        num_valid = self._reasoning.count_valid(tokens[:count])
        if num_valid < count or count == len(tokens):
            return num_valid
        return count + self._answer.count_valid(tokens[count:])

    def rollback(self, count: int) -> None:
        of_answer = min(count, self._num_answer)
        if of_answer:
            self._num_answer -= of_answer
            self._answer.rollback(of_answer)
        self._rollback_reasoning(count - of_answer)

    @property
    def _may_begin(self) -> bool:
        return not self._num_reasoning and not self._num_answer

    def _advance_reasoning(self, tokens: Sequence[int]) -> int:
        """Let reasoning consume the leading tokens that belong to it, with its end. How many these are."""
        count = 0
        for token in tokens:
            if not self._reasoning.inside and not (self._may_begin and token == self._begin_id):
                break
            self._reasoning.advance([token])
            self._num_reasoning += 1
            count += 1
        return count

    def _rollback_reasoning(self, count: int) -> None:
        self._reasoning.rollback(count)
        self._num_reasoning -= count
