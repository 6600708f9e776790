"""Stored weights as fp32, checked to be numbers."""

import numpy as np
from numpy.typing import NDArray

from quire.core.errors import BadCheckpoint
from quire.ops.compiled import native
from quire.ops.dequantize import dequantize
from quire.ops.tensors import StoredTensor

Floats = NDArray[np.float32]


def read_floats(tensor: StoredTensor) -> Floats:
    """-> [rows, columns]. NaN and Inf are refused: no scale holds them, and they would spoil their whole block."""
    if tensor.column_order is not None:
        values: Floats = dequantize(tensor)
    else:
        data = tensor.data if tensor.row_order is None else tensor.data[tensor.row_order]
        values = native.dequantize(tensor.type.name, np.ascontiguousarray(data), tensor.num_columns)
    if not np.isfinite(values.sum()) and (wrong := int((~np.isfinite(values)).sum())):
        raise BadCheckpoint(
            f"tensor {tensor.name!r} has {wrong} weights that are not numbers (NaN or Inf) among {values.size}",
            "the checkpoint is damaged, or its training diverged",
        )
    return values
