"""OUT.partial: what a run keeps while it works, and the head that takes the name OUT when it is whole."""

import fcntl
import json
import shutil
from pathlib import Path
from typing import Any, BinaryIO

from safetensors.torch import save_file

from quire.quantize.output import OutputError, check_free
from quire.train.trainable_head import TrainableHead

LOCK = "lock"
WHOLE = "head"  # the folder that becomes OUT
WEIGHTS = {"eagle3": "model.safetensors", "medusa": "medusa_lm_head.safetensors"}


class PartialHead:
    def __init__(self, out: Path, source: Path) -> None:
        check_free(out, source)
        self.out, self.folder = out, out.with_name(out.name + ".partial")
        self._lock: BinaryIO | None = None

    def __enter__(self) -> "PartialHead":
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._lock = (self.folder / LOCK).open("a+b")
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise OutputError(
                f"{self.folder} is being written by another process", "wait for it, or name another output"
            ) from error
        except OSError as error:
            raise OutputError(f"{self.folder} cannot be written: {error.strerror}") from error
        return self

    def __exit__(self, *_: object) -> None:
        if self._lock is not None:
            self._lock.close()

    def finish(self, method: str, head: TrainableHead, config: dict[str, Any], training: dict[str, Any]) -> int:
        """The head takes its name, and what the run has kept goes. -> bytes of the weights"""
        whole = self.folder / WHOLE
        shutil.rmtree(whole, ignore_errors=True)
        whole.mkdir()
        weights = whole / WEIGHTS[method]
        save_file(head.published(), weights, {"format": "pt"})
        for name, values in (("config.json", config), ("training.json", training)):
            (whole / name).write_text(json.dumps(values, indent=2) + "\n")
        size = weights.stat().st_size
        if self.out.exists():
            self.out.rmdir()  # checked to be empty
        whole.replace(self.out)
        shutil.rmtree(self.folder)
        return size
