"""Writes the tables of docs/other-engines.md from the options of other engines; a test fails where they are stale.

python tools/other_engines_page.py"""

from collections import defaultdict
from pathlib import Path

from quire.engine.peers import SHORT_FLAGS
from quire.engine.peers.kinds import NoEffect, Only, PeerOption, Renamed
from quire.engine.peers.llama_server import LLAMA_SERVER
from quire.engine.peers.sglang import SGLANG
from quire.engine.peers.tgi import TGI
from quire.engine.peers.transformers import TRANSFORMERS
from quire.engine.peers.vllm import VLLM

PAGE = Path(__file__).parent.parent / "docs" / "other-engines.md"
WIDTH = 120

TABLES = {
    "vLLM": VLLM,
    "Text Generation Inference": TGI,
    "llama-server": LLAMA_SERVER,
    "SGLang": SGLANG,
    "transformers": TRANSFORMERS,
}


def page() -> str:
    """What is written by hand ends where the short flags begin."""
    head = PAGE.read_text().partition("Short flags: ")[0]
    return f"{head}{_short_flags()}\n" + "".join(_section(*table) for table in TABLES.items())


def _short_flags() -> str:
    lines = ["Short flags:"]
    for number, flag in enumerate(sorted(SHORT_FLAGS), 1):
        word = f"`{flag}`{'.' if number == len(SHORT_FLAGS) else ','}"
        if len(lines[-1]) + 1 + len(word) > WIDTH:
            lines.append(word)
        else:
            lines[-1] += f" {word}"
    return "\n".join(lines) + "\n"


def _section(title: str, options: dict[str, PeerOption]) -> str:
    renamed = [f"| `{name}` | {_here(peer)} |" for name, peer in sorted(options.items()) if isinstance(peer, Renamed)]
    tables = [
        ("| written | here |", renamed),
        ("| Without effect | because |", _by_reason(options, NoEffect)),
        ("| Refused, but for values that ask for nothing | because |", _by_reason(options, Only)),
    ]
    text = "".join(f"\n{head}\n|---|---|\n" + "".join(f"{row}\n" for row in rows) for head, rows in tables if rows)
    return f"## {title}\n{text}\n" if title != [*TABLES][-1] else f"## {title}\n{text}"


def _here(peer: Renamed) -> str:
    values = {
        name: "the default" if value is None else f"`{str(value).lower()}`" for name, value in peer.values.items()
    }
    if peer.switch:
        return f"`{peer.option}`: {values['true']}" if values else f"`{peer.option}`"
    changed = ", ".join(f"`{name}` is {value}" for name, value in values.items() if value != f"`{name}`")
    return f"`{peer.option}` ({changed})" if changed else f"`{peer.option}`"


def _by_reason(options: dict[str, PeerOption], kind: type[NoEffect] | type[Only]) -> list[str]:
    names = defaultdict(list)
    for name, peer in sorted(options.items()):
        if isinstance(peer, kind):
            names[peer.reason].append(f"`{name}`")
    return [f"| {', '.join(same)} | {reason} |" for reason, same in names.items()]


if __name__ == "__main__":
    PAGE.write_text(page())
