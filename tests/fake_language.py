"""A text is a hash of its tokens, and a language model is a function of it: the same in every process."""

SEED = 0x9E3779B97F4A7C15
MASK = 2**64 - 1


def mix(state: int, value: int) -> int:
    """A hash of (state, value) that is the same in every process."""
    x = (state ^ (value + SEED)) * 0xBF58476D1CE4E5B9 & MASK
    x = (x ^ x >> 27) * 0x94D049BB133111EB & MASK
    return x ^ x >> 31


def chain(tokens: list[int], state: int = 0) -> list[int]:
    """For each position a hash of all tokens up to it: what keys and values of that position depend on."""
    states = []
    for token in tokens:
        state = mix(state, token)
        states.append(state)
    return states


def adapter_state(adapter: str) -> int:
    """The hash that a text starts from under a LoRA adapter: its keys and values differ from the first token on."""
    return chain([ord(letter) for letter in adapter])[-1] if adapter else 0


def language_model(state: int, vocab_size: int) -> list[float]:
    """Logprob of each next token after a text whose hash is `state`. Not normalized; all values differ."""
    return [-0.1 - (mix(state, token) % 10_000_019) / 1_000_000 for token in range(vocab_size)]
