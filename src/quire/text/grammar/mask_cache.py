"""Masks of a regex, cached by its state.

A regex has few states, and its sequences meet them again and again. llguidance takes up to a millisecond for a mask and
does not expose whether two sequences are in the same state; an automaton of the regex does."""

from codecs import getincrementaldecoder
from collections import OrderedDict
from collections.abc import Callable

from quire.text.grammar.regex_automaton import RegexAutomaton, UnsupportedRegex

MASK_CACHE_BYTES = 64 * 2**20  # of all cached masks
MAX_STATES_BYTES = 4 * 2**20  # of the states of one regex, estimated:
STATE_BYTES, NODE_BYTES, TRANSITION_BYTES = 400, 50, 100
MIN_LOOKUPS = 1000  # before the hit rate is judged
MIN_HIT_RATE = 0.25  # below it, the regex has too many states for a cache

Utf8Decoder = getincrementaldecoder("utf-8")


class RegexState:
    """Which tokens may follow depends on this state alone."""

    __slots__ = ("mask", "nodes", "partial", "transitions")

    def __init__(self, nodes: frozenset[int], partial: bytes) -> None:
        self.nodes = nodes  # active nodes of the automaton
        self.partial = partial  # the first bytes of an incomplete UTF-8 character
        self.transitions: dict[int, RegexState | None] = {}  # by token
        self.mask: bytes | None = None

    def allows(self, token: int) -> bool:
        """Whether the cached mask has the token; False without one."""
        return self.mask is not None and self.mask[token >> 3] >> (token & 7) & 1 == 1


class MaskCache:
    """The masks of all states of all regexes: an LRU cache."""

    def __init__(self, num_bytes: int = MASK_CACHE_BYTES) -> None:
        self._free_bytes = num_bytes
        self._states: OrderedDict[RegexState, None] = OrderedDict()  # least recently used first

    def get(self, state: RegexState) -> bytes | None:
        if state.mask is not None:
            self._states.move_to_end(state)
        return state.mask

    def put(self, state: RegexState, mask: bytes) -> None:
        state.mask = mask
        self._states[state] = None
        self._free_bytes -= len(mask)
        while self._free_bytes < 0:
            oldest, _ = self._states.popitem(last=False)
            assert oldest.mask is not None
            self._free_bytes += len(oldest.mask)
            oldest.mask = None


class RegexStates:
    """The states of one regex, created as sequences reach them. Too many of them are dropped and created again."""

    def __init__(self, automaton: RegexAutomaton, text_bytes: Callable[[int], bytes | None], masks: MaskCache) -> None:
        """`text_bytes`: the bytes of a token; None for a token that is not text."""
        self._automaton, self._text_bytes, self._masks = automaton, text_bytes, masks
        self._num_lookups = self._num_hits = 0
        self._reset()

    @classmethod
    def of(cls, regex: str, text_bytes: Callable[[int], bytes | None], masks: MaskCache) -> "RegexStates | None":
        """None for a regex without an automaton."""
        try:
            return cls(RegexAutomaton(regex), text_bytes, masks)
        except UnsupportedRegex:
            return None

    def _reset(self) -> None:
        self._num_bytes = 0
        self._states: dict[tuple[frozenset[int], bytes], RegexState] = {}
        self._steps: dict[tuple[frozenset[int], str], frozenset[int]] = {}
        self.start = self._state(self._automaton.start, b"")

    @property
    def worth_caching(self) -> bool:
        return self._num_lookups < MIN_LOOKUPS or self._num_hits > self._num_lookups * MIN_HIT_RATE

    def after(self, state: RegexState, token: int) -> RegexState | None:
        """The state after one more token. None if there is none, or if it is not known."""
        try:
            return state.transitions[token]
        except KeyError:
            self._num_bytes += TRANSITION_BYTES
            target = state.transitions[token] = self._follow(state, token)
            if self._num_bytes > MAX_STATES_BYTES:
                self._reset()
            return target

    def cached_mask(self, state: RegexState) -> bytes | None:
        mask = self._masks.get(state)
        self._num_lookups += 1
        self._num_hits += mask is not None
        return mask

    def cache_mask(self, state: RegexState, mask: bytes) -> None:
        self._masks.put(state, mask)

    def _follow(self, state: RegexState, token: int) -> RegexState | None:
        text = self._text_bytes(token)
        if text is None:
            return None
        decoder, nodes = Utf8Decoder(), state.nodes
        try:
            for character in decoder.decode(state.partial + text):
                nodes = self._steps.get((nodes, character)) or self._step(nodes, character)
        except (UnicodeDecodeError, UnsupportedRegex):
            return None
        return self._state(nodes, decoder.getstate()[0]) if nodes else None

    def _step(self, nodes: frozenset[int], character: str) -> frozenset[int]:
        self._num_bytes += TRANSITION_BYTES
        target = self._steps[nodes, character] = self._automaton.step(nodes, character)
        return target

    def _state(self, nodes: frozenset[int], partial: bytes) -> RegexState:
        if (state := self._states.get((nodes, partial))) is None:
            self._num_bytes += STATE_BYTES + NODE_BYTES * len(nodes)
            state = self._states[nodes, partial] = RegexState(nodes, partial)
        return state
