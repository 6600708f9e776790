"""A prefill engine in a thread of the test's process."""

import json
import threading
from pathlib import Path

from quire.engine.engine import Engine
from quire.engine.options import EngineOptions
from quire.engine.start import new_executor
from quire.hub.adapters import resolve_adapter


class PrefillThread:
    """Computes prompts for others until it is stopped."""

    def __init__(self, model: Path, address: str, **options: object) -> None:
        config = json.dumps({"kv_role": "kv_producer", "kv_peers": [address]})
        given = EngineOptions.of({"model": str(model), "max_num_seqs": 4, "kv_transfer_config": config, **options})
        executor = new_executor(model, given)
        self.engine = Engine(executor, given)
        assert executor.transfer is not None
        self.transfer = executor.transfer
        self._stopping = False
        self._thread = threading.Thread(target=self._run)

    @property
    def address(self) -> str:
        """To connect to, over TCP."""
        return f"127.0.0.1:{self.transfer.port}"  # type: ignore[union-attr]

    @property
    def sent_bytes(self) -> int:
        return self.transfer.stats().sent_bytes

    def add_adapter(self, name: str, path: Path) -> None:
        self.engine.add_adapter(name, self.engine.executor.load_adapter(resolve_adapter(str(path))))

    def __enter__(self) -> "PrefillThread":
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stopping = True
        self._thread.join()
        self.engine.stop()

    def _run(self) -> None:
        while not self._stopping:
            if self.engine.has_work:
                self.engine.step()
                self.engine._scheduler.check()
            else:
                self.transfer.news.wait(0.01)
