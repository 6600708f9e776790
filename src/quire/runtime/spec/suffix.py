"""Suffix decoding: what followed the last tokens earlier in this text, or in recent answers of the same tenant."""

from collections import OrderedDict, deque
from collections.abc import Mapping

import numpy as np

from quire.core.draft_tree import DraftTree, without_chain
from quire.core.plan import Admission
from quire.core.prefix_tree import Namespace
from quire.ops.compiled import native
from quire.ops.opset import Int32
from quire.runtime.spec.proposer import Proposer, ProposerContext

MAX_TEXT = 1 << 20  # tokens of one sequence that are looked at
MAX_ANSWERS = 1 << 17  # tokens of answers that are kept for a namespace: 1.5 MiB
MAX_NAMESPACES = 32  # whose answers are kept: the ones last used
_BORDER = np.array([-1], np.int32)


class _Answers:
    """Recent answers of one namespace, in one history."""

    def __init__(self, max_requests: int) -> None:
        self.history = native.TokenHistory(MAX_ANSWERS)
        self._max_requests = max_requests
        self._starts: deque[int] = deque()

    def add(self, tokens: Int32) -> None:
        self._starts.append(len(self.history))
        self.history.append(_BORDER)
        self.history.append(tokens)
        if len(self._starts) > self._max_requests:
            self._starts.popleft()
            self.history.forget_before(self._starts[0])


class _Text:
    """A row's tokens."""

    def __init__(self, num_prompt: int, namespace: Namespace) -> None:
        self.num_prompt, self.namespace = num_prompt, namespace
        self.history = native.TokenHistory(MAX_TEXT)
        self.answer: list[Int32] = []

    def update(self, tokens: Int32) -> None:
        """All tokens so far: those that are new are appended."""
        seen = len(self.history)
        self.history.append(tokens[seen:])
        if len(new := tokens[max(seen, self.num_prompt) :]):
            self.answer.append(new.copy())


class Suffix(Proposer):
    """Of all earlier places where the last tokens stood, proposes what most of them continued with; as a tree, what
    each of them continued with, by how many did."""

    def __init__(
        self, context: ProposerContext, num_tokens: int, *, suffix_decoding_max_tree_depth: int,
        suffix_decoding_max_cached_requests: int, suffix_decoding_max_spec_factor: float,
        suffix_decoding_min_token_prob: float, tree_nodes: int = 0,
    ) -> None:  # fmt: skip
        self.tree_nodes = tree_nodes
        self._max_requests = suffix_decoding_max_cached_requests
        self._rules = (
            suffix_decoding_max_tree_depth,
            suffix_decoding_max_spec_factor,
            suffix_decoding_min_token_prob,
        )
        self._texts: dict[int, _Text] = {}
        self._answers: OrderedDict[Namespace, _Answers] = OrderedDict()

    def admit(self, admission: Admission) -> None:
        self._texts[admission.row] = _Text(admission.num_prompt, admission.namespace)

    def propose(self, known: Mapping[int, Int32], counts: Mapping[int, int]) -> dict[int, DraftTree]:
        drafted = {row: self._drafts(self._texts[row], tokens, counts[row]) for row, tokens in known.items()}
        return {row: drafts for row, drafts in drafted.items() if drafts.tokens}

    def retire(self, row: int) -> None:
        text = self._texts.pop(row, None)
        if text is not None and text.answer and self._max_requests:
            self._answers_of(text.namespace).add(np.concatenate(text.answer))

    def _drafts(self, text: _Text, tokens: Int32, count: int) -> DraftTree:
        text.update(tokens)
        answers = self._answers.get(text.namespace)
        histories = text.history, answers.history if answers else None
        if not self.tree_nodes:
            return DraftTree(native.suffix_drafts(*histories, count, *self._rules))
        drafts, parents, confidences = native.suffix_tree(*histories, self.tree_nodes, count, *self._rules)
        return DraftTree(drafts, without_chain(parents), confidences)

    def _answers_of(self, namespace: Namespace) -> _Answers:
        answers = self._answers.setdefault(namespace, _Answers(self._max_requests))
        self._answers.move_to_end(namespace)
        if len(self._answers) > MAX_NAMESPACES:
            self._answers.popitem(last=False)
        return answers
