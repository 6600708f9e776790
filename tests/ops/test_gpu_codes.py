"""What a GPU keeps of GGUF's types: codes, scales and offsets that make the same numbers. Packing needs no GPU."""

import numpy as np
import pytest
import torch

from ops.stored_blocks import stored_rows
from quire.ops.dequantize import dequantize
from quire.ops.tensors import STORAGE_TYPES, StoredTensor
from quire.ops.torch.gpu_codes import DECODED, load_codes
from quire.ops.torch.kernels.quant_layout import GroupedWeight

ROWS, COLUMNS = 5, 512


def numbers(weight: GroupedWeight) -> torch.Tensor:
    """[num_outputs, num_inputs], by what quant_layout says of planes, groups and tables."""
    planes = [weight.words >> weight.bits * plane & (1 << weight.bits) - 1 for plane in range(32 // weight.bits)]
    stored = torch.stack(planes, 2).flatten(1)[:, : weight.num_inputs]
    codes = stored.to(torch.uint8).view(torch.int8) if weight.bits == 8 else stored - weight.zero
    values = torch.tensor(weight.table)[codes.long()] if weight.table else codes.float()

    def of_inputs(groups: torch.Tensor) -> torch.Tensor:
        return groups.float().T.repeat_interleave(weight.group, 1)[:, : weight.num_inputs]

    scaled = of_inputs(weight.scales) * values
    return scaled if weight.offsets is None else scaled + of_inputs(weight.offsets)


@pytest.mark.parametrize("name", DECODED)
def test_codes_make_the_numbers_of_the_file(name: str) -> None:
    type = STORAGE_TYPES[name]
    tensor = StoredTensor(name, (ROWS, COLUMNS), type, stored_rows(type, ROWS, COLUMNS))
    weight = load_codes([tensor], torch.device("cpu"))
    assert isinstance(weight, GroupedWeight) and weight.bits == DECODED[name]
    np.testing.assert_array_equal(numbers(weight).numpy(), dequantize(tensor).reshape(ROWS, COLUMNS))
