"""What encoder-decoders share: the first tokens of answers, and the keys and values of cross-attention.

The encoder encodes a source and writes the keys and values of every cross-attention of the decoder to the KV cache
(`write_source`). The decoder is a decoder like others, with cross-attention in each layer."""

from collections.abc import Sequence
from typing import Any

from quire.core.errors import BadCheckpoint, Unsupported
from quire.core.seq2seq import Seq2Seq
from quire.models.config import Seq2SeqConfig
from quire.ops.opset import OpSet, Value
from quire.ops.tensors import PackedWeight
from quire.weights.config import CheckpointConfig


def read_seq2seq(hf: CheckpointConfig, max_source: int, max_answer: int) -> Seq2Seq:
    start = hf.generation("decoder_start_token_id", hf.generation("bos_token_id"))
    if type(start) is not int:
        raise BadCheckpoint(f"{hf.source}: decoder_start_token_id is {start!r}, and answers begin with that token")
    forced, last = hf.generation("forced_bos_token_id"), hf.generation("forced_eos_token_id")
    last = last[0] if isinstance(last, list) and len(last) == 1 else last
    for key, token in (("forced_bos_token_id", forced), ("forced_eos_token_id", last)):
        if token is not None and type(token) is not int:
            raise Unsupported(f"{hf.source}: {key} is {token!r}", "one token can be forced")
    banned = [*hf.generation("bad_words_ids", []), *([token] for token in hf.generation("suppress_tokens", []))]
    return Seq2Seq(
        start_ids=(start,) if forced is None else (start, forced),
        max_encoder_tokens=max_source,
        max_decoder_tokens=max_answer,
        forced_eos_id=last,
        bad_words_ids=tuple(tuple(sequence) for sequence in banned),
    )


def write_source(c: Seq2SeqConfig, cross_kv: Sequence[PackedWeight], ops: OpSet, x: Value, batch: Any) -> Value:
    """The last step of an encoder, whose output is x. `cross_kv`: the weights of every layer of the decoder."""
    for index, weight in enumerate(cross_kv):
        k, v = ops.split(ops.linear(x, weight), (c.kv_size, c.kv_size))
        ops.write_kv(k, v, batch, index)
    return ops.rows(x, batch)
