"""Which row of the hardware table the GPU of this machine is."""

import re
from pathlib import Path

from quire.core.errors import BadRequest
from quire.planning.hardware import HARDWARE, Hardware

DRIVER = Path("/proc/driver/nvidia/gpus")  # a folder for each GPU, with its name in `information`


def this_gpu() -> Hardware:
    """The hardware of the first GPU, by the name that the driver gives it: `NVIDIA A100-SXM4-80GB` is a100-80gb."""
    name = _name()
    words = set(re.split(r"[\s-]+", name.lower()))
    rows = [row for row in HARDWARE.values() if row.is_gpu and set(row.name.split("-")) <= words]
    if not rows:
        known = ", ".join(row.name for row in HARDWARE.values() if row.is_gpu)
        raise BadRequest(
            f"the GPU of this machine is `{name}`, which is not known", f"choose from {known}", param="hardware"
        )
    return rows[0]


def _name() -> str:
    for file in sorted(DRIVER.glob("*/information")):
        if match := re.search(r"^Model:\s*(.+?)\s*$", file.read_text(), re.MULTILINE):
            return match[1]
    return "unknown"
