"""Checkpoints of states in fewer bits: what is lost, and that both backends agree on what is left."""

import numpy as np
import pytest
import torch

from quire.ops.checkpoint_numbers import read_checkpoint, write_checkpoint
from quire.ops.kv_spec import CHECKPOINT_GROUP, KVSpec, StateSpec
from quire.ops.native.cache import NativeCache
from quire.ops.reference.cache import TorchCache

STATES = StateSpec(3, (2, 8, 24), 20, 4)  # 3 * (64 + 384) numbers
ERRORS = {"bfloat16": 2.0**-8, "int8": 0.5 / 127}  # of a number, of the largest of its group


def there_and_back(numbers: np.ndarray, dtype: str) -> np.ndarray:
    spec = StateSpec(1, (len(numbers),), checkpoint_dtype=dtype)
    padded = np.zeros(spec.slot_bytes // 4, np.float32)
    padded[: len(numbers)] = numbers
    small = np.zeros(spec.checkpoint_bytes, np.uint8)
    write_checkpoint(padded, small, dtype)
    again = np.full_like(padded, 7.0)
    read_checkpoint(small, again, dtype)
    return again[: len(numbers)]


@pytest.mark.parametrize("size", [1, 63, 64, 1000, 200_000])
def test_numbers_lose_no_more_than_their_bits(size: int) -> None:
    numbers = np.random.default_rng(size).normal(size=size).astype(np.float32) * np.float32(3.0)
    expected = torch.from_numpy(numbers).bfloat16().float().numpy()
    np.testing.assert_array_equal(there_and_back(numbers, "bfloat16"), expected)
    groups = np.pad(numbers, (0, -size % CHECKPOINT_GROUP)).reshape(-1, CHECKPOINT_GROUP)
    bounds = np.repeat(np.abs(groups).max(1), CHECKPOINT_GROUP)[:size] * ERRORS["int8"] * 1.001
    assert (np.abs(there_and_back(numbers, "int8") - numbers) <= bounds).all()


@pytest.mark.parametrize("dtype", ERRORS)
def test_what_was_small_before_stays_as_it_is(dtype: str) -> None:
    once = there_and_back(np.random.default_rng(0).normal(size=4096).astype(np.float32), dtype)
    np.testing.assert_allclose(there_and_back(once, dtype), once, rtol=1e-6)


@pytest.mark.parametrize("dtype", ERRORS)
def test_zeros_and_what_is_not_finite_are_kept(dtype: str) -> None:
    numbers = np.zeros(3 * CHECKPOINT_GROUP, np.float32)
    numbers[CHECKPOINT_GROUP], numbers[-1] = np.nan, -np.inf
    again = there_and_back(numbers, dtype)
    assert (again[:CHECKPOINT_GROUP] == 0).all()
    assert np.isnan(again[CHECKPOINT_GROUP]) and not np.isfinite(again[-1])


@pytest.mark.parametrize("dtype", ["float32", *ERRORS])
@pytest.mark.parametrize("on_host", [False, True])
def test_slots_are_copied_to_checkpoints_and_back(dtype: str, on_host: bool) -> None:
    """By the native cache as by the reference, by way of the host or of the device alone."""
    has_slots = dtype != "float32"
    states = StateSpec(
        *(STATES.num_layers, STATES.shape, STATES.conv_channels, STATES.conv_taps, 2, 1, dtype),
        num_checkpoint_slots=2 * has_slots,
        small_host_slots=has_slots,
    )
    spec = KVSpec(1, 1, 8, 16, "float16", states=states)
    conv, recurrent = (torch.randn(3, *shape) for shape in (states.conv_shape, states.shape))
    native, plain = NativeCache(spec, 1), TorchCache(spec, 1, 0, "cpu")
    layers = native.slots.reshape(2, 3, -1)
    layers[:] = 0
    layers[0, :, : conv[0].numel()] = conv.flatten(1).numpy()
    layers[0, :, states.conv_numbers :] = recurrent.flatten(1).numpy()
    assert plain.slots is not None
    plain.slots.write(0, [conv, recurrent])
    for cache in (native, plain):
        if on_host:
            cache.swap_states_out([(0, 0)])
            cache.swap_states_in([(0, 1)])
        elif has_slots:
            cache.copy_states([(0, 3)])
            cache.copy_states([(3, 1)])
        else:
            return
    theirs_conv, theirs = plain.slots.read(1)
    bound = ERRORS.get(dtype, 0.0) * float(max(conv.abs().max(), recurrent.abs().max())) * 1.001
    assert float((theirs - recurrent).abs().max()) <= bound >= float((theirs_conv - conv).abs().max())
    ours = torch.from_numpy(layers[1, :, states.conv_numbers :].copy()).unflatten(1, states.shape)
    assert float((ours - recurrent).abs().max()) <= bound
    assert dtype == "int8" or torch.equal(ours, theirs)
    with pytest.raises(ValueError, match="copy of state 0 of 4 to state 9 of 4" if has_slots else "of 2 to state 9"):
        native.copy_states([(0, 9)])


def test_bytes_of_a_checkpoint() -> None:
    sizes = {
        dtype: StateSpec(2, (4, 16, 16), checkpoint_dtype=dtype).checkpoint_bytes for dtype in ("float32", *ERRORS)
    }
    assert sizes == {"float32": 8192, "bfloat16": 4096, "int8": 2048 + 4 * 2048 // CHECKPOINT_GROUP}
