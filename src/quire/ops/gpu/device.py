"""Which GPU this is."""

from typing import Any

import torch
import triton


def describe() -> dict[str, Any]:
    properties = torch.cuda.get_device_properties(0)
    return {
        "name": properties.name,
        "memory": properties.total_memory,  # bytes
        "multiprocessors": properties.multi_processor_count,
        "torch": torch.__version__,
        "triton": triton.__version__,
    }
