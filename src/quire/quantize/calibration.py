"""Texts become token sequences, and a forward pass over them tells how large the inputs of each linear layer are."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from quire.ops.tensors import StoredTensor
from quire.quantize.device import Array, Device, Report
from quire.quantize.floats import Floats
from quire.quantize.input_sources import InputSource
from quire.quantize.plan import Importance, QuantizeError
from quire.text.tokenizers.tokenizer import Tokenizer
from quire.weights.checkpoint import Checkpoint

MIN_TOKENS = 64
HELD_OUT = 10  # the last tenth of the text is kept for measuring
MAX_TEXT_BYTES = 64 << 20
CHARACTERS_A_TOKEN = 6  # of a long text, kept for each token that is needed
HELD_OUT_TOKENS = 8192
WINDOWS = 32


def default_text() -> str:
    """Python's own reference, which comes with it: English and code."""
    from pydoc_data.topics import topics

    return "\n\n".join(topics[name] for name in sorted(topics))


def read_text(path: Path | None) -> str:
    """The text to calibrate with; None: the default one."""
    if path is None:
        return default_text()
    try:
        if (size := path.stat().st_size) > MAX_TEXT_BYTES:
            raise QuantizeError(f"{path} has {size} bytes, and {MAX_TEXT_BYTES} are read at most", "cut it")
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise QuantizeError(f"{path} cannot be read: {error.strerror}", "name a text file") from error
    except UnicodeDecodeError as error:
        raise QuantizeError(f"{path} is not UTF-8: {error.reason}", "convert it, with iconv say") from error
    if not text.strip():
        raise QuantizeError(f"{path} is empty", "name a file with some pages of text like what the model will see")
    return text


def sequences(
    model: Path, text: str, length: int, num_tokens: int, *, measures: bool = True
) -> tuple[list[list[int]], list[list[int]]]:
    """-> sequences of `length` tokens to calibrate with, about `num_tokens` in all and spread over the text, and those
    of its last tenth, which are held out: none unless the run `measures` its quality."""
    tokenizer = Tokenizer.load(model)
    cut = len(text) - len(text) // HELD_OUT
    used = _sequences(tokenizer, _spread(text[:cut], CHARACTERS_A_TOKEN * num_tokens), length)
    rest = _spread(text[cut:], CHARACTERS_A_TOKEN * HELD_OUT_TOKENS) if measures else ""
    held_out = _sequences(tokenizer, rest, length) if rest else []
    if (count := sum(map(len, used))) < MIN_TOKENS:
        raise QuantizeError(
            f"the calibration text has {count} tokens, and {MIN_TOKENS} are the least", "give some pages"
        )
    wanted = max(num_tokens // len(used[0]), 1)
    step = max(len(used) // wanted, 1)
    return used[::step][:wanted], held_out


def _sequences(tokenizer: Tokenizer, text: str, length: int) -> list[list[int]]:
    """Sequences of one length, which is less than `length` where the text is short; each begins as the model
    expects."""
    bos = tokenizer.bos_id
    prefix = [bos] if bos is not None and tokenizer.encode("a")[:1] == [bos] else []
    ids = tokenizer.encode(text, add_special_tokens=False)
    size = max(min(length - len(prefix), len(ids)), 1)
    return [prefix + ids[first : first + size] for first in range(0, len(ids) - size + 1, size)]


def _spread(text: str, limit: int) -> str:
    """At most `limit` characters, from all over the text: what is not needed is not tokenized."""
    if len(text) <= limit:
        return text
    window, kept = len(text) // WINDOWS, limit // WINDOWS
    return "".join(text[first : first + kept] for first in range(0, len(text) - window + 1, window))


class ImportanceSums:
    """A hook that sums the squares of the inputs of every linear layer."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._sums: dict[str, Array] = {}
        self._largest: dict[str, Array] = {}
        self.counts: dict[str, int] = {}

    def observe(
        self, parts: Sequence[StoredTensor], x: Array, source: InputSource | None = None, stream: Any = None
    ) -> None:
        parts = [part for part in parts if "." in part.name]  # constants, which share a name, are not the checkpoint's
        for part in parts:
            self.counts[part.name] = self.counts.get(part.name, 0) + len(x)
        if not len(x):
            return
        squares, largest = self._device.squares(x), self._device.largest(x)
        for part in parts:
            known = self._sums.get(part.name)
            self._sums[part.name] = squares if known is None else known + squares
            most = self._largest.get(part.name)
            self._largest[part.name] = largest if most is None else self._device.maximum(most, largest)

    def weights(self, parts: Sequence[StoredTensor]) -> Sequence[Array]:
        return [self._device.read(part) for part in parts]

    @property
    def sums(self) -> dict[str, Floats]:
        return {name: self._device.numpy(vector) for name, vector in self._sums.items()}

    @property
    def largest(self) -> dict[str, float]:
        return {name: float(value) for name, value in self._largest.items()}


def collect_importance(
    checkpoint: Checkpoint, all_sequences: Sequence[Sequence[int]], source: str, device: Device, report: Report
) -> Importance:
    hook = ImportanceSums(device)
    kv_largest = device.observe(checkpoint, all_sequences, hook, report)
    return Importance(hook.sums, hook.counts, source, hook.largest, kv_largest)
