"""How fast packed matrices are multiplied, from memory.

    python -m benchmarks.matrix --threads 2 --rows 1 8 64 --types Q4_1 Q8_0

For each storage type, matrices of 64 MB in all are multiplied in turn, so that no cache holds them; the fastest product
counts. Beside its time stand the bytes of weights read in a second, which bounds one row, and the products of weights
and activations, which bounds many. A call from Python (allocation, quantizing, waking the threads) is part of the time.
"""

import argparse
import json
import os
import time

import numpy as np
from numpy.typing import NDArray

from quire import _native
from quire.ops.tensors import STORAGE_TYPES, StorageType

NUM_OUTPUTS, NUM_INPUTS = 3072, 768
TOTAL_BYTES = 64 << 20


def stored_rows(type: StorageType) -> NDArray[np.uint8]:
    """Rows of zeros: speed does not depend on values, as long as they are not subnormal."""
    return np.zeros((NUM_OUTPUTS, NUM_INPUTS // type.block * type.block_bytes), dtype=np.uint8)


def measure(type: StorageType, num_rows: int, num_threads: int, num_passes: int = 7) -> dict[str, float | str]:
    data = stored_rows(type)
    matrices = [_native.Matrix(type.name, [data], NUM_INPUTS)]
    while len(matrices) * matrices[0].nbytes < TOTAL_BYTES:
        matrices.append(_native.Matrix(type.name, [data], NUM_INPUTS))
    x = np.random.default_rng(0).standard_normal((num_rows, NUM_INPUTS)).astype(np.float32)
    seconds = []
    for _ in range(num_passes):
        for matrix in matrices:
            start = time.perf_counter()
            _native.multiply(matrix, x, num_threads)
            seconds.append(time.perf_counter() - start)
    best = min(seconds)
    return {
        "type": type.name,
        "layout": matrices[0].layout,
        "rows": num_rows,
        "threads": num_threads,
        "ms": best * 1e3,
        "gb_per_s": matrices[0].nbytes / best / 1e9,
        "gmac_per_s": num_rows * NUM_OUTPUTS * NUM_INPUTS / best / 1e9,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--types", nargs="+", choices=list(STORAGE_TYPES), default=list(STORAGE_TYPES))
    args = parser.parse_args()
    print(f"table {_native.isa()}, matrices [{NUM_OUTPUTS}, {NUM_INPUTS}]")
    print(f"{'type':6} {'layout':9} {'rows':>5} {'threads':>7} {'ms':>9} {'GB/s':>7} {'GMAC/s':>7}")
    results = []
    for name in args.types:
        for num_rows in args.rows:
            result = measure(STORAGE_TYPES[name], num_rows, args.threads)
            results.append(result)
            print(
                f"{name:6} {result['layout']:9} {num_rows:5} {args.threads:7} {result['ms']:9.3f} "
                f"{result['gb_per_s']:7.1f} {result['gmac_per_s']:7.1f}"
            )
    print(json.dumps({"benchmark": "matrix", "table": _native.isa(), "results": results}))


if __name__ == "__main__":
    main()
