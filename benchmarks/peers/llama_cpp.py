"""llama.cpp through its C interface: no Python between the tokens of a batch. Needs llama-cpp-python."""

import ctypes
from collections.abc import Sequence

import llama_cpp as lc  # type: ignore[import-not-found]
import numpy as np

BATCH = 512  # tokens in one call, llama.cpp's own default for its physical batch


class Context:
    """A model and a cache of `num_seqs` sequences."""

    def __init__(self, path: str, threads: int, num_seqs: int, length: int) -> None:
        lc.llama_backend_init()
        silence()
        self.model = lc.llama_model_load_from_file(path.encode(), lc.llama_model_default_params())
        assert self.model, f"llama.cpp cannot load {path}"
        params = lc.llama_context_default_params()
        params.n_ctx = num_seqs * length
        params.n_batch = params.n_ubatch = BATCH
        params.n_seq_max = num_seqs
        params.n_threads = params.n_threads_batch = threads
        self.context = lc.llama_init_from_model(self.model, params)
        self.vocab_size: int = lc.llama_vocab_n_tokens(lc.llama_model_get_vocab(self.model))
        self.batch = lc.llama_batch_init(BATCH, 0, 1)

    def decode(
        self, tokens: Sequence[int], positions: Sequence[int], seqs: Sequence[int], wanted: Sequence[bool]
    ) -> None:
        """Compute one batch; `wanted` says which rows' logits are."""
        batch = self.batch
        batch.n_tokens = len(tokens)
        for i, (token, position, seq, logits) in enumerate(zip(tokens, positions, seqs, wanted, strict=True)):
            batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.seq_id[i][0] = token, position, 1, seq
            batch.logits[i] = logits
        assert lc.llama_decode(self.context, batch) == 0

    def logits(self, row: int) -> np.ndarray:
        return np.ctypeslib.as_array(lc.llama_get_logits_ith(self.context, row), shape=(self.vocab_size,))

    def clear(self) -> None:
        lc.llama_memory_clear(lc.llama_get_memory(self.context), True)


@lc.llama_log_callback  # type: ignore[untyped-decorator]
def _silent(level: int, text: bytes, data: ctypes.c_void_p) -> None:
    pass


def silence() -> None:
    lc.llama_log_set(_silent, ctypes.c_void_p(0))
