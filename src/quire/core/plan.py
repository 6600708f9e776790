"""What one step computes, and what it yields: plain data, the only thing that passes between deciding and computing.

A sequence holds a *row* from admission until it ends or is preempted. The runner keeps what it knows of a row
(parameters, tokens, block table), so a plan says only what is new."""

from dataclasses import dataclass, field

from quire.core.params import SamplingParams
from quire.core.request import IdLogprob


@dataclass(slots=True)
class Admission:
    """A sequence takes a row."""

    row: int
    params: SamplingParams
    sample: int  # which sample of its request: randomness is keyed by (seed, sample, position)
    tokens: list[int]  # all that is known: prompt, then output so far
    num_prompt: int
    blocks: list[int]  # its block table, including the blocks of this step
    stop_ids: list[int]  # tokens that may not be drawn before min_tokens
    num_encoder_tokens: int = 0  # leading tokens that the encoder reads; their slots are padded to whole blocks
    adapter: int = -1  # the slot of its adapter; -1: it has none


@dataclass(slots=True)
class Run:
    """The row's tokens at positions start .. start + count are computed; those before are in the cache.

    If they reach the last known token, the runner draws the next one and appends it to the row. With `drafts`, which
    are guesses at what follows and count as tokens of the run, it goes on drawing as long as it draws the drafts. The
    row then has the tokens drawn, and the blocks that they fill but for the last: others are given back."""

    row: int
    start: int
    count: int
    new_blocks: list[int] = field(default_factory=list)  # appended to the row's table; not for a row admitted now
    drafts: list[int] = field(default_factory=list)  # the last tokens of the run


@dataclass(slots=True)
class StepPlan:
    """Carried out in this order: retire, swap out, swap in, copy, adapters, admit, compute."""

    step: int
    runs: list[Run]
    retired: list[int] = field(default_factory=list)  # rows that are free again
    swap_out: list[tuple[int, int]] = field(default_factory=list)  # (block, host block)
    swap_in: list[tuple[int, int]] = field(default_factory=list)  # (host block, block)
    copies: list[tuple[int, int]] = field(default_factory=list)  # (from block, to block): copy-on-write
    adapters: list[tuple[int, str]] = field(default_factory=list)  # (slot, the adapter that is put into it)
    admitted: list[Admission] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        return sum(run.count for run in self.runs)

    @property
    def num_drafts(self) -> int:
        return sum(len(run.drafts) for run in self.runs)


@dataclass(slots=True)
class SampledRow:
    """What one row yielded. A row whose run ended inside its prompt yields nothing, or prompt_logprobs alone."""

    row: int
    tokens: list[int] = field(default_factory=list)
    logprobs: list[list[IdLogprob]] | None = None  # as in SequenceEvent
    prompt_logprobs: list[list[IdLogprob]] | None = None  # for positions start + 1 .. of the run, within the prompt
    beams: list[IdLogprob] | None = None  # beam search: the 2 * beam_width best continuations; `tokens` is empty
    drafts: list[int] = field(default_factory=list)  # guesses at what follows `tokens`
    error: str = ""  # nothing could be drawn: the sequence ends with this reason; `tokens` is empty


@dataclass(slots=True)
class StepOutput:
    step: int
    sampled: list[SampledRow]
