"""What one step computes and what it yields: plain data, all that passes between the scheduler and an executor.

A sequence holds a *row* from admission until it ends or is preempted. The runner keeps the state of each row
(parameters, tokens, block table), so a plan contains only what is new."""

from dataclasses import dataclass, field

from quire.core.block_keys import BlockKey
from quire.core.draft_tree import DraftTree
from quire.core.params import SamplingParams
from quire.core.prefix_tree import Namespace
from quire.core.request import IdLogprob

UNKNOWN = -1  # a draft token that only the device knows: there it waits until it is verified


@dataclass(slots=True)
class Admission:
    """A sequence takes a row."""

    row: int
    params: SamplingParams
    sample: int  # which sample of its request: randomness is keyed by (seed, sample, position)
    tokens: list[int]  # prompt, then output so far
    num_prompt: int
    blocks: list[int]  # the sequence's block table, including the blocks of this step
    stop_ids: list[int]  # tokens that are not sampled before min_tokens
    num_encoder_tokens: int = 0  # leading tokens that the encoder reads; their slots are padded to whole blocks
    adapter: int = -1  # the slot of its LoRA adapter; -1: none
    mu: float | None = None  # mirostat's, after `tokens`; None: at its start
    namespace: Namespace = ("", "", "")  # texts of one are not looked up for another
    reads_along: bool = True  # whether heads read it while the target does: else they can never draft for it


@dataclass(slots=True)
class Run:
    """Compute the row's tokens at positions start .. start + count; those before are in the KV cache.

    A run that reaches the last known token samples the next one, and the runner appends it to the row. `drafts` follow
    the last known token and count as tokens of the run: the runner samples at each position as long as the sample
    equals the draft. It keeps the sampled tokens and the blocks of all but the last of them, and drops other blocks.

    With `parents`, the drafts are a tree (core/draft_tree.py): draft n is computed at place start + count - len(drafts)
    + n, and its position is that of its parent and one. The runner goes on at the child that was sampled, and moves the
    keys and values of the accepted drafts to the places of a chain. If only the device knows the tree, its drafts are
    UNKNOWN and its parents UNKNOWN_PARENT; `SampledRow.tree` tells what it was."""

    row: int
    start: int
    count: int
    new_blocks: list[int] = field(default_factory=list)  # for the row's block table; an admission has its own
    drafts: list[int] = field(default_factory=list)  # draft tokens, or UNKNOWN: the last tokens of the run
    parents: list[int] = field(default_factory=list)  # of each draft; empty: a chain
    # Draft tokens that methods which are not free are to propose: of more than a method's chains have, a tree.
    quotas: dict[str, int] = field(default_factory=dict)
    num_enough: int = 0  # free draft tokens that are worth more than these; 0: none are
    asks_free: bool = True  # whether the methods that are free propose draft tokens after this run
    state: int = -1  # of a model with state slots: the one with the state at `start`; -1: there is none yet
    states: list[tuple[int, int]] = field(default_factory=list)  # (position, slot for the state of all tokens before)


@dataclass(slots=True)
class Fetch:
    """Read blocks into host blocks, in order, up to the first that cannot be read. The last may be a state."""

    id: int
    blocks: list[tuple[BlockKey, int]]  # (key, host block)


@dataclass(slots=True)
class RemotePrefill:
    """Let another engine compute the keys and values of `tokens`, and put them into host blocks, in order. Of a model
    with state slots, the state after the last token goes into the last of them, which is a host slot."""

    id: int
    tokens: list[int]
    namespace: Namespace
    first: int  # the block of `tokens` that the first host block is for: those before it are here
    host_blocks: list[int]


@dataclass(slots=True)
class BlockSend:
    """Send a host block to the engine that has asked for a prefill; its state comes behind the last block."""

    host_block: int
    request_id: str  # of the prefill
    index: int  # of the block in its tokens


@dataclass(slots=True)
class StepPlan:
    """Carried out in this order: retire, checkpoints, swap out, pages, swap in, resumed, copy, adapters, admit,
    compute.

    Checkpoints that are smaller than states have slots of their own, which are numbered behind the state slots.

    A host block has room for a block and for its window page, which are swapped each by itself.

    Saves, fetches, prefills and sends begin after the swaps. The step does not wait for them, nor does the next. They
    name host slots, or the window pages of host blocks, as host blocks: those are numbered behind the last of these."""

    step: int
    runs: list[Run]
    retired: list[int] = field(default_factory=list)  # rows that the runner forgets
    swap_out: list[tuple[int, int]] = field(default_factory=list)  # (block, host block)
    swap_in: list[tuple[int, int]] = field(default_factory=list)  # (host block, block)
    checkpoints: list[tuple[int, int]] = field(default_factory=list)  # (state slot, checkpoint slot)
    resumed: list[tuple[int, int]] = field(default_factory=list)  # (checkpoint slot, state slot)
    state_swap_out: list[tuple[int, int]] = field(default_factory=list)  # (state or checkpoint slot, host slot)
    state_swap_in: list[tuple[int, int]] = field(default_factory=list)  # (host slot, state slot)
    saves: list[tuple[int, BlockKey]] = field(default_factory=list)  # host blocks to write to the disk, by key
    fetches: list[Fetch] = field(default_factory=list)
    prefills: list[RemotePrefill] = field(default_factory=list)
    sends: list[BlockSend] = field(default_factory=list)
    pages: list[tuple[int, int]] = field(default_factory=list)  # (block, its window page from now on)
    page_swap_out: list[tuple[int, int]] = field(default_factory=list)  # (window page, host block)
    page_swap_in: list[tuple[int, int]] = field(default_factory=list)  # (host block, window page)
    copies: list[tuple[int, int]] = field(default_factory=list)  # (from block, to block): copy-on-write
    page_copies: list[tuple[int, int]] = field(default_factory=list)  # (source, target) of window pages
    adapters: list[tuple[int, str]] = field(default_factory=list)  # (slot, the LoRA adapter to load into it)
    admitted: list[Admission] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        return sum([run.count for run in self.runs])

    @property
    def num_drafts(self) -> int:
        return sum(len(run.drafts) for run in self.runs)

    @property
    def has_swaps(self) -> bool:
        """Whether it has references to the host."""
        to_host = self.swap_out or self.page_swap_out or self.state_swap_out
        return bool(to_host or self.swap_in or self.page_swap_in or self.state_swap_in)

    @property
    def swapped_host_blocks(self) -> list[int]:
        """The host blocks that it has references to."""
        swapped_in = (host for host, _ in (*self.swap_in, *self.page_swap_in))
        return [*(host for _, host in (*self.swap_out, *self.page_swap_out)), *swapped_in]


@dataclass(slots=True)
class Proposal:
    """Draft tokens that may follow the tokens of a row, by one method. They may be UNKNOWN, all of them: then a tree
    has no confidences, and its parents are UNKNOWN_PARENT."""

    method: str
    tokens: list[int]
    parents: list[int] = field(default_factory=list)  # of each of them; empty: a chain
    confidences: list[float] = field(default_factory=list)  # as in DraftTree


@dataclass(slots=True)
class SampledRow:
    """The tokens that one row sampled. A run that ends inside a prompt yields nothing, or prompt_logprobs alone."""

    row: int
    tokens: list[int] = field(default_factory=list)
    logprobs: list[list[IdLogprob]] | None = None  # as in SequenceEvent
    prompt_logprobs: list[list[IdLogprob]] | None = None  # for positions start + 1 .. of the run, within the prompt
    beams: list[IdLogprob] | None = None  # beam search: the 2 * beam_width best continuations; `tokens` is empty
    proposals: list[Proposal] = field(default_factory=list)  # draft tokens that may follow `tokens`
    mu: float | None = None  # mirostat's, after `tokens`
    tree: DraftTree | None = None  # that was verified, or a part of it, if the plan did not know it
    error: str = ""  # why sampling failed, which ends the sequence; `tokens` is empty


@dataclass(slots=True)
class StepOutput:
    step: int
    sampled: list[SampledRow]
    draft_seconds: float = 0.0  # of the step's time, what methods took to propose draft tokens and to read prompts
    draft_steps: dict[str, list[tuple[int, float]]] = field(default_factory=dict)  # by method: (tokens, seconds)
    is_timed: bool = True  # False: drafts were compiled or captured beside it, and its time tells nothing
    device_seconds: float = 0.0  # of the forward pass and sampling, where the host runs ahead of a device that tells
