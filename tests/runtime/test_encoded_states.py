"""Texts that are encoded by a model with recurrent states."""

import numpy as np
import pytest

from quire.core.encode_request import EncodeInput
from quire.runtime.encoder import EncoderRunner
from runtime.tiny_model import BACKENDS, MAX_LEN, make_ops, random_bamba


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_text_has_no_state_of_the_texts_before_it(backend: str) -> None:
    ops = make_ops(backend)
    runner = EncoderRunner(ops, random_bamba(ops), max_tokens=MAX_LEN, max_rows=4, max_model_len=MAX_LEN)
    texts = [EncodeInput(ids) for ids in ([5, 6, 7], list(range(20)), [5, 6, 7, 8])]
    together = runner.run(texts, "last", np.copy)
    alone = [runner.run([text], "last", np.copy)[0] for text in texts]
    np.testing.assert_allclose(together, alone, atol=1e-4)
