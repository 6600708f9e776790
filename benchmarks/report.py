"""One comparison's figures: a table on stdout, then all of it as one line of JSON."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.ceilings import Ceilings
from benchmarks.engines import Engines
from benchmarks.machine import describe
from benchmarks.table import Section, render


class Report:
    def __init__(self, model: Path, engines: Engines, ceilings: Ceilings | None, kept: Path | None) -> None:
        self.model = model
        self.engines = engines
        self.ceilings = ceilings
        self._machine = describe()
        self._versions = engines.versions()
        self._sections: list[Section] = []
        self._kept = kept  # a file for the result

    def add(self, *sections: Section) -> None:
        """What was found is kept at once: a run that is broken off has not been for nothing."""
        self._sections += sections
        if self._kept:
            self._kept.write_text(json.dumps(self._result(), indent=1) + "\n")

    def finish(self) -> None:
        print(f"{self._heading()}\n\n{render(self._sections, self.engines.names)}\n")
        print(json.dumps(self._result()))

    def _heading(self) -> str:
        machine = self._machine
        lines = [
            f"{self.model.name}, {self.engines.threads} threads, {machine['cpu']}, commit {machine['commit']}",
            "medians (lowest - highest)",
        ]
        if self.ceilings:
            lines[1] += (
                f" and the share of this machine's memory bandwidth, {self.ceilings.gigabytes:.1f} GB/s (decode 1), "
                f"or int8 peak, {self.ceilings.int8_gigamacs:.0f} billion multiply-adds/s (prefill, decode 32)"
            )
        return "\n".join(lines)

    def _result(self) -> dict[str, Any]:
        return {
            "benchmark": "comparison",
            "model": self.model.name,
            "threads": self.engines.threads,
            "machine": self._machine,
            "versions": self._versions,
            "ceilings": self.ceilings and asdict(self.ceilings),
            "sections": [asdict(section) for section in self._sections],
        }
