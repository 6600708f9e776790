"""The generator against the vectors its authors publish (Random123, kat_vectors), and our two against each other."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire import _native
from quire.ops.philox import philox4x32, random_bits

KNOWN_ANSWERS = [  # philox4x32-10: counter, key, words
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]
word = st.integers(0, 2**32 - 1)


@pytest.mark.parametrize(("counter", "key", "words"), KNOWN_ANSWERS)
def test_published_vectors(counter, key, words):
    assert philox4x32(counter, key) == words
    assert tuple(_native.philox4x32(counter, key)) == words


@given(st.tuples(word, word, word, word), st.tuples(word, word))
def test_native_equals_python(counter, key):
    assert tuple(_native.philox4x32(counter, key)) == philox4x32(counter, key)


def test_key_is_the_seed_in_twos_complement():
    assert random_bits(-1, 5, 0) == random_bits(2**64 - 1, 5, 0)
    assert random_bits(1, 5, 0) != random_bits(1 + 2**32, 5, 0)


def test_numbers_are_uniform_and_differ_by_seed_position_and_sample():
    drawn = [random_bits(seed, position, sample) for seed in range(16) for position in range(64) for sample in range(4)]
    assert len({key for key, _ in drawn}) == len(drawn)
    numbers = [bits * 2.0**-53 for _, bits in drawn]
    assert len(set(numbers)) == len(numbers)
    assert 0.0 <= min(numbers) < 0.01
    assert 0.99 < max(numbers) < 1.0
    assert abs(sum(numbers) / len(numbers) - 0.5) < 4 * (1 / 12 / len(numbers)) ** 0.5
