"""Hardware as data: memory, bandwidth and peak rates of one device, from its maker's data sheet, without sparsity."""

import re
from dataclasses import dataclass
from difflib import get_close_matches

from quire.core.errors import BadRequest

GB, TERA = 10**9, 10**12
GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Hardware:
    """One device. Rates are operations a second: a multiply-add is two."""

    name: str
    memory: int  # bytes
    bandwidth: float  # bytes a second
    flops: float  # 16-bit matrix operations a second
    flops_8bit: float  # the same in fp8 or int8; 0: it has none
    link: float  # bytes a second that one device sends to the others; 0: it stands alone
    price: float = 0.0  # US dollars an hour; 0: not known
    measured: bool = False  # by this program, on this machine
    is_gpu: bool = True
    threads: int = 8  # of a CPU, that compute
    process_bytes: int | None = None  # of an engine process without a model; None: not measured
    utilization: float = 0.9  # of a GPU's memory, the share that an engine takes: `--gpu-memory-utilization`

    @property
    def ridge(self) -> float:
        """Operations a byte at which 16-bit matmuls stop being bound by memory."""
        return self.flops / self.bandwidth


def _gpu(name: str, gib: float, gbs: float, tflops: float, tflops8: float, link: float, price: float) -> Hardware:
    return Hardware(name, int(gib * GIB), gbs * GB, tflops * TERA, tflops8 * TERA, link * GB, price)


def _cpu(name: str, gib: float, gbs: float, gflops: float, gops8: float) -> Hardware:
    return Hardware(name, int(gib * GIB), gbs * GB, gflops * GB, gops8 * GB, 0, is_gpu=False)


PRICE_SOURCE = "a typical on-demand price of one device an hour in US dollars; give --price for yours"

# Memory GiB, bandwidth GB/s, dense 16-bit and 8-bit TFLOP/s, link GB/s in one direction, US dollars an hour.
_ROWS = (
    _gpu("l4", 22.5, 300, 121, 242, 32, 0.80),
    _gpu("a10", 22.5, 600, 125, 250, 32, 1.00),
    _gpu("l40s", 44.5, 864, 362, 733, 32, 1.20),
    _gpu("a100-40gb", 39.6, 1555, 312, 624, 300, 1.80),
    _gpu("a100-80gb", 79.2, 2039, 312, 624, 300, 2.20),
    _gpu("h100", 79.2, 3350, 989, 1979, 450, 3.00),
    _gpu("h200", 139.8, 4800, 989, 1979, 450, 3.80),
    _gpu("b200", 178.4, 8000, 2250, 4500, 900, 6.00),
    _gpu("mi300x", 191.5, 5300, 1307, 2615, 448, 3.50),
    _gpu("rtx-3090", 23.6, 936, 71, 284, 32, 0.30),
    _gpu("rtx-4090", 23.6, 1008, 165, 330, 32, 0.50),
    _gpu("rtx-5090", 31.3, 1792, 209, 419, 64, 0.80),
    _cpu("laptop-8-cores", 16, 80, 600, 2400),  # AVX2, LPDDR5
    _cpu("apple-m3-max", 64, 400, 7000, 14000),
    _cpu("epyc-9654", 768, 460, 14700, 29500),  # 96 cores, twelve channels of DDR5
    _cpu("xeon-8480-amx", 512, 307, 57300, 114700),  # 56 cores, eight channels of DDR5
    _cpu("graviton4", 768, 537, 8600, 17200),  # 96 Neoverse-V2 cores
    _cpu("raspberry-pi-5", 8, 17, 77, 307),
)
HARDWARE = {row.name: row for row in _ROWS}


def usable_memory(hardware: Hardware, num_devices: int = 1) -> int:
    """Bytes of all devices that an engine takes."""
    return int(num_devices * hardware.memory * (hardware.utilization if hardware.is_gpu else 1.0))


# Words of a name that nvidia-smi, clouds and other planners add. Memory is one where there is one size only.
_MAKERS = re.compile(r"nvidia|geforce|tesla|amd|instinct|sxm\d?|hbm\de?|oam")
_MEMORY = re.compile(r"\d+gb")


def find_hardware(name: str) -> Hardware:
    """A row by its name, or by one such as `NVIDIA H100 80GB HBM3` or `h200_sxm`."""
    words = [word for word in re.split(r"[\s_-]+", name.lower().strip()) if word and not _MAKERS.fullmatch(word)]
    key, short = "-".join(words), "-".join(word for word in words if not _MEMORY.fullmatch(word))
    if (row := HARDWARE.get(key) or HARDWARE.get(short)) is None:
        begun = [known for known in HARDWARE if key and known.startswith(f"{key}-")]
        near = begun or get_close_matches(key, HARDWARE, 3, 0.4)
        hint = f"near it: {', '.join(near)}" if near else f"choose from {', '.join(HARDWARE)}"
        raise BadRequest(f"no hardware is called `{name}`", hint, param="hardware")
    return row


def kv_dtype_on(hardware: Hardware, asked: str) -> str:
    """auto: float16 on a CPU, and on a GPU what it computes in."""
    return "bfloat16" if asked == "auto" and hardware.is_gpu else asked
