"""What adapters add to a linear layer, in Triton (interpreted where there is no GPU) and in plain torch."""

import numpy as np
import pytest
import torch

from ops.low_rank import added, low_rank, random
from quire.ops.gpu.linear.lora import GpuLoraSlots, add_lora, sort_by_slot
from quire.ops.reference.lora import add_lora as plain_add_lora

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
CASES = {  # inputs, sizes of parts, largest rank, rows
    "one part": (32, (48,), 8, 5),
    "odd": (41, (65, 7, 7), 5, 19),
    "splits": (530, (70, 33), 64, 3),
    "one row": (16, (16,), 1, 1),
    "many rows": (24, (20,), 16, 150),
}


def slots_of(name, dtype):
    num_inputs, sizes, max_rank, num_rows = CASES[name]
    parts = [
        [low_rank(max_rank, num_inputs, size, 0.3) for size in sizes],
        [None] * (len(sizes) - 1) + [low_rank(max(max_rank // 2, 1), num_inputs, sizes[-1], 2.0)],
        [None] * len(sizes),
    ]
    slots = GpuLoraSlots(num_inputs, sizes, len(parts), max_rank, DEVICE, dtype)
    for slot, each in enumerate(parts):
        slots.put(slot, slots.pack(each))
    adapters = np.random.default_rng(1).integers(-1, 3, num_rows).astype(np.int32)
    adapters[0] = 0
    return slots, parts, random(num_rows, num_inputs), adapters, sizes


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_the_sum_is_that_in_fp64(name, dtype):
    slots, parts, x, adapters, sizes = slots_of(name, dtype)
    y = random(len(x), sum(sizes))
    expected = y + added(x, adapters, parts, sizes)
    on_device = [torch.tensor(array, device=DEVICE).to(dtype) for array in (y, x)]
    rows = torch.tensor(adapters, device=DEVICE)
    plain = plain_add_lora(*on_device, slots, rows).float().cpu().numpy()
    routing = sort_by_slot(rows, slots.num_slots, batch_invariant=False)
    actual = add_lora(*on_device, slots, routing).float().cpu().numpy()
    bound = (1e-6 if dtype == torch.float32 else 3e-3) * np.abs(expected).max()
    assert np.abs(plain - expected).max() < bound
    assert np.abs(actual - expected).max() < bound


def test_a_row_is_the_same_in_any_company():
    slots, _, x, adapters, sizes = slots_of("odd", torch.float32)
    rows, values = torch.tensor(adapters, device=DEVICE), torch.tensor(x, device=DEVICE)

    def run(chosen):
        y = torch.zeros(len(chosen), sum(sizes), device=DEVICE)
        return add_lora(y, values[chosen], slots, sort_by_slot(rows[chosen], slots.num_slots, True))

    together = run(list(range(len(x))))
    for chosen in ([0], [7, 2], list(range(5, 19))):
        assert torch.equal(run(chosen), together[chosen])


def test_an_emptied_slot_adds_nothing():
    slots, _, x, adapters, sizes = slots_of("one part", torch.float32)
    for slot in range(3):
        slots.put(slot, None)
    y, values = torch.ones(len(x), sum(sizes), device=DEVICE), torch.tensor(x, device=DEVICE)
    rows = torch.tensor(adapters, device=DEVICE)
    assert torch.equal(add_lora(y.clone(), values, slots, sort_by_slot(rows, 3, False)), y)
