"""Tiles of GEMMs with weights in groups."""

from typing import Any, NamedTuple


class GroupedConfig(NamedTuple):
    block_m: int  # tokens a program
    block_n: int  # outputs a program
    splits: int  # of K
    serial: bool  # as in StreamConfig
    warps: int
    stages: int
    registers: int = 0  # of a thread at most, so that several programs share a multiprocessor; 0: as many as it takes
    fold: bool = False  # scales go into the weights, which are rounded to 16 bits as `dequantize` does

    @property
    def launch_options(self) -> dict[str, Any]:
        return {"num_warps": self.warps} | ({"maxnreg": self.registers} if self.registers else {})
