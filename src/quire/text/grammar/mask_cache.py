"""Masks that are remembered. An expression has few states, in which its answers are again and again; but making a mask
takes llguidance up to a millisecond, and it does not tell that two answers are in the same state. Automata do."""

from codecs import getincrementaldecoder
from collections import OrderedDict
from collections.abc import Callable

from quire.text.grammar.regex_automaton import RegexAutomaton, UnsupportedRegex

MASK_BYTES = 64 * 2**20  # of all masks that are remembered
STATES_BYTES = 4 * 2**20  # of the states of one expression, about
STATE_BYTES, PLACE_BYTES, LINK_BYTES = 400, 50, 100
TRIAL = 1000  # masks, of which
WORTH = 0.25  # has to have been known: there may be so many states that none is met again

Utf8 = getincrementaldecoder("utf-8")


class RegexState:
    """What a text may go on with depends on its state alone."""

    __slots__ = ("links", "mask", "places", "rest")

    def __init__(self, places: frozenset[int], rest: bytes) -> None:
        self.places = places  # in the automaton
        self.rest = rest  # the beginning of a character
        self.links: dict[int, RegexState | None] = {}  # by token
        self.mask: bytes | None = None

    def permits(self, token: int) -> bool:
        """As far as is known."""
        return self.mask is not None and self.mask[token >> 3] >> (token & 7) & 1 == 1


class MaskCache:
    """The masks of all states of all expressions. Those used last are kept."""

    def __init__(self, num_bytes: int = MASK_BYTES) -> None:
        self._free = num_bytes
        self._states: OrderedDict[RegexState, None] = OrderedDict()

    def find(self, state: RegexState) -> bytes | None:
        if state.mask is not None:
            self._states.move_to_end(state)
        return state.mask

    def put(self, state: RegexState, mask: bytes) -> None:
        state.mask = mask
        self._states[state] = None
        self._free -= len(mask)
        while self._free < 0:
            oldest, _ = self._states.popitem(last=False)
            assert oldest.mask is not None
            self._free += len(oldest.mask)
            oldest.mask = None


class RegexStates:
    """Of one expression, as they are met. When there are too many, they are forgotten, and met again."""

    def __init__(self, automaton: RegexAutomaton, spelling: Callable[[int], bytes | None], shelf: MaskCache) -> None:
        """`spelling`: of a token; None if it is none of a text."""
        self._automaton, self._spelling, self._shelf = automaton, spelling, shelf
        self._num_asked = self._num_found = 0
        self._forget()

    @classmethod
    def of(cls, expression: str, spelling: Callable[[int], bytes | None], shelf: MaskCache) -> "RegexStates | None":
        """None: they cannot be told apart."""
        try:
            return cls(RegexAutomaton(expression), spelling, shelf)
        except UnsupportedRegex:
            return None

    def _forget(self) -> None:
        self._num_bytes = 0
        self._known: dict[tuple[frozenset[int], bytes], RegexState] = {}
        self._steps: dict[tuple[frozenset[int], str], frozenset[int]] = {}
        self.start = self._state(self._automaton.start, b"")

    @property
    def useful(self) -> bool:
        return self._num_asked < TRIAL or self._num_found > self._num_asked * WORTH

    def after(self, state: RegexState, token: int) -> RegexState | None:
        """None: it is not known, or there is none."""
        try:
            return state.links[token]
        except KeyError:
            self._num_bytes += LINK_BYTES
            found = state.links[token] = self._follow(state, token)
            if self._num_bytes > STATES_BYTES:
                self._forget()
            return found

    def mask(self, state: RegexState) -> bytes | None:
        found = self._shelf.find(state)
        self._num_asked += 1
        self._num_found += found is not None
        return found

    def keep(self, state: RegexState, mask: bytes) -> None:
        self._shelf.put(state, mask)

    def _follow(self, state: RegexState, token: int) -> RegexState | None:
        spelling = self._spelling(token)
        if spelling is None:
            return None
        decoder, places = Utf8(), state.places
        try:
            for character in decoder.decode(state.rest + spelling):
                places = self._steps.get((places, character)) or self._step(places, character)
        except (UnicodeDecodeError, UnsupportedRegex):
            return None
        return self._state(places, decoder.getstate()[0]) if places else None

    def _step(self, places: frozenset[int], character: str) -> frozenset[int]:
        self._num_bytes += LINK_BYTES
        found = self._steps[places, character] = self._automaton.step(places, character)
        return found

    def _state(self, places: frozenset[int], rest: bytes) -> RegexState:
        if (found := self._known.get((places, rest))) is None:
            self._num_bytes += STATE_BYTES + PLACE_BYTES * len(places)
            found = self._known[places, rest] = RegexState(places, rest)
        return found
