"""Which GPU this is, and how much of it torch has used."""

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


def peak_allocated() -> int:
    """Bytes of tensors, since the process began."""
    return int(torch.cuda.max_memory_allocated())
