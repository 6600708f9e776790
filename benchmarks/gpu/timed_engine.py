"""An engine on GPUs with random weights, started by options as `quire serve` takes them, and how fast it decodes."""

import json
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from quire.core.params import SamplingParams
from quire.core.request import Request
from quire.engine.engine import Engine
from quire.engine.options import EngineOptions
from quire.engine.start import new_executor


@contextmanager
def started(shape: dict[str, Any], device: str = "cuda", **options: Any) -> Iterator[Engine]:
    """`shape`: a config.json."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(shape))
        given = EngineOptions(
            model=folder, device=device, load_format="dummy", enable_prefix_caching=False, max_model_len=2048, **options
        )
        engine = Engine(new_executor(Path(folder), given), given)
        try:
            yield engine
        finally:
            engine.stop()


def decode_seconds(engine: Engine, vocab: int, batch: int, num_prompt: int = 64, num_new: int = 24) -> float:
    """Of a step in which `batch` sequences get a token: the median, after a warm-up."""
    ids = np.random.default_rng(0)
    params = SamplingParams(temperature=0.0, max_tokens=num_new, ignore_eos=True, seed=0)
    for number in range(batch):
        prompt = ids.integers(0, vocab, num_prompt).tolist()
        engine.submit(Request(id=f"{batch}-{number}", prompt_ids=prompt, params=params))
    times, last = [], time.perf_counter()
    while engine.has_work:
        engine.step()
        now = time.perf_counter()
        if engine.record is not None and engine.record.num_tokens == batch:
            times.append(now - last)
        last = now
    return statistics.median(times[3:])
