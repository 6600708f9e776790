"""Traces as CSV: the columns that published ones call differently."""

import csv
from datetime import datetime
from pathlib import Path
from typing import Any

from quire.core.errors import BadRequest

# What has the time, the tokens of a prompt and those of an output, in small letters.
TIMES = ("timestamp", "arrival", "arrived_at")
PROMPTS = ("contexttokens", "request tokens", "num_prefill_tokens", "input_length", "prompt_tokens", "input_tokens")
OUTPUTS = ("generatedtokens", "response tokens", "num_decode_tokens", "output_length", "output_tokens")
KNOWN = "Azure's TIMESTAMP,ContextTokens,GeneratedTokens; BurstGPT's Timestamp,Model,Request tokens,Response tokens"


class TraceColumns:
    """The columns of a file whose first line is `header`. Times are seconds, or dates; they count from the first."""

    def __init__(self, path: Path, header: str) -> None:
        names = [name.strip().lower() for name in _cells(header.removeprefix("\ufeff"))]
        indices = [next((names.index(name) for name in known if name in names), -1) for known in _KINDS]
        if -1 in indices:
            raise BadRequest(
                f"{path}: line 1 is neither JSON nor the names of a trace's columns",
                f"known are {KNOWN}",
                param="trace",
            )
        self._time, self._prompt, self._output = indices
        self._model = names.index("model") if "model" in names else -1
        self._first: float | datetime | None = None

    def values(self, line: str, model: str | None = None) -> dict[str, Any] | None:
        """A request as a line of JSON has it. None: it failed, so that it has no tokens, or asks another model. Raises
        ValueError, or TypeError, where it is neither."""
        cells = _cells(line)
        if max(self._time, self._prompt, self._output) >= len(cells):
            raise ValueError(line)
        prompt, output = float(cells[self._prompt]), float(cells[self._output])
        if prompt == 0 or output == 0 or (model is not None and self._model >= 0 and cells[self._model] != model):
            return None
        return {"timestamp": self._seconds(cells[self._time].strip()), "input_length": prompt, "output_length": output}

    def _seconds(self, text: str) -> float:
        try:
            now: float | datetime = float(text)
        except ValueError:
            now = datetime.fromisoformat(text)
        first = self._first = now if self._first is None else self._first
        if isinstance(now, datetime) and isinstance(first, datetime):
            return (now - first).total_seconds()
        if isinstance(now, float) and isinstance(first, float):
            return now - first
        raise ValueError(text)


_KINDS = (TIMES, PROMPTS, OUTPUTS)


def _cells(line: str) -> list[str]:
    return next(csv.reader([line]), [])
