"""The sizes of a comparison on the command line. Each comparison has some of these, with defaults of its own."""

from dataclasses import dataclass

from quire.cli.bench.setup import check_bounds
from quire.cli.parser import UsageError
from quire.engine.option import option


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    repeats: int = option(3, "rounds; both sides take turns in each, and a figure is their median", minimum=1)
    num_prompts: int = option(24, "requests", minimum=1)
    batch_size: int = option(8, "sequences at a time", minimum=1)
    batch_sizes: tuple[int, ...] = option((1, 2, 4, 8, 16, 32), "numbers of sequences at a time", several=True)
    input_len: int = option(32, "tokens of a prompt: random ids", minimum=1)
    output_len: int = option(64, "tokens sampled for a prompt at most; nothing ends earlier by itself", minimum=2)
    lengths: tuple[int, ...] = option((128, 256, 512), "lengths to compare, in tokens", several=True)
    chunk_size: int = option(64, "tokens of a prompt in one step at most, where prefill is chunked", minimum=1)
    context: int = option(2048, "tokens that a contiguous cache reserves for each sequence", minimum=2)
    text: str | None = option(None, "a text to score instead of Python's reference manual", metavar="FILE")
    text_len: int = option(512, "tokens of the text that are scored at most", minimum=16)

    def __post_init__(self) -> None:
        check_bounds(self)
        for name in ("lengths", "batch_sizes"):
            values = getattr(self, name)
            if min(values) < 1:
                raise UsageError(f"--{name.replace('_', '-')} has {min(values)}", "give numbers of at least 1")
