"""Models of tests/models as two ranks or two stages compute them: `QUIRE_TEST_DEVICE=ranks pytest tests/models`.

Ranks are threads, and stages are computed one after the other. What cannot be divided so is skipped, with the reason
that users read; tests/ranks/test_registry.py and tests/pipeline/test_registry.py say which families these are."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from models.checking import Logits, on_host
from pipeline.stages_here import InStages
from quire.core.errors import Unsupported
from ranks.rank_threads import InRanks, OneProcess, batch_of

SIZE = 2


class Divided:
    """In the place of an op set."""

    def __init__(self, kind: str) -> None:
        """`kind`: ranks or stages."""
        self.kind = kind

    def compute(self, path: Path) -> Logits:
        """As models.checking.compute."""
        try:
            return _by_ranks(path) if self.kind == "ranks" else _by_stages(path)
        except Unsupported as error:
            pytest.skip(str(error))


def _by_ranks(path: Path) -> Logits:
    try:
        ranks = InRanks("native", path, SIZE)
    except Unsupported as error:
        if error.hint != "use enable_expert_parallel":
            raise
        ranks = InRanks("native", path, SIZE, experts=True)
    pool = ThreadPoolExecutor(SIZE)

    def run(ids: list[int], start: int) -> np.ndarray:
        def logits(rank: OneProcess) -> np.ndarray:
            batch = batch_of(ids, start, None)
            batch.logit_rows = np.arange(batch.num_tokens, dtype=np.int32)
            return on_host(rank.program.run(batch))

        first, *_ = pool.map(logits, ranks.ranks)
        return first

    return run


def _by_stages(path: Path) -> Logits:
    stages = InStages(path, SIZE)
    return lambda ids, start: stages.logits(ids, start, all_rows=True)
