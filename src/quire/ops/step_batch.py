"""A step as a backend takes it: flat arrays."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Value = Any  # [tokens, columns]: a torch tensor, or a recorded or deferred one
Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]
Float32 = NDArray[np.float32]
WORD_BITS = 64  # of a word of `StepBatch.ancestors`


@dataclass(slots=True)
class StepBatch:
    """A step as flat arrays: T tokens of S sequences, R of which need logits.

    The tokens of a sequence are at the last places of its context. `ancestors` makes a tree of the places behind some
    text, of this step and of steps before it: bit j of a token's word says that the token sees the j-th of them. A
    token sees itself, its ancestors, and all places before the tree. Its position is then that of a text without the
    tokens it does not see; so the tree begins at place position + 1 - the bits of the word, the same for all tokens of
    a sequence. Words of sequences with more than WORD_BITS tokens are not read: a token sees all tokens before it."""

    ids: Int32  # [T]
    positions: Int32  # [T]
    slots: Int32  # [T] where the token's K and V are written: block * block_size + offset
    seq_starts: Int32  # [S + 1] the tokens of sequence s are seq_starts[s] .. seq_starts[s + 1]
    context_lens: Int32  # [S] tokens to attend to, including the tokens of this step
    block_tables: Int32  # [S, W] block ids; entries past ceil(context_len / block_size) are not read
    logit_rows: Int32  # [R] tokens that need logits
    adapters: Int32 | None = None  # [T] the slot of the token's LoRA adapter, or -1; None: no token has one
    source_lens: Int32 | None = None  # [S] tokens of the encoder's output, in encoder-decoder models
    source_tables: Int32 | None = None  # [S, W] the blocks of its keys and values
    ancestors: Int64 | None = None  # [T] words; None: no tree, every token sees the tokens before it
    hidden_rows: Int32 | None = None  # [T] the row of the `HiddenStates` that the token reads, in heads that draft
    states: Int32 | None = None  # [G, 3] segments of tokens, of models with recurrent states; see `StateSpec`

    @property
    def num_tokens(self) -> int:
        return len(self.ids)
