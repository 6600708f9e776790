"""T5, BART and their kin beside transformers."""

import numpy as np
import pytest
import torch
from transformers import (
    BartForConditionalGeneration,
    M2M100ForConditionalGeneration,
    MarianMTModel,
    MBartForConditionalGeneration,
    MT5ForConditionalGeneration,
    PegasusForConditionalGeneration,
    PLBartForConditionalGeneration,
    T5ForConditionalGeneration,
    UMT5ForConditionalGeneration,
)
from transformers.models.t5.modeling_t5 import T5Attention

from quire.models.bart import sinusoidal_positions, tensor2tensor_positions
from quire.models.t5 import bucket

from .checking import BACKENDS
from .checking_seq2seq import MAX_LEN, START, Cases, check_against_transformers, checkpoints_of

T5_TINY = {"d_model": 64, "d_kv": 32, "d_ff": 96, "num_layers": 2, "num_heads": 4}
BART_TINY = {
    "d_model": 128,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 112,
    "decoder_ffn_dim": 96,
    "max_position_embeddings": MAX_LEN,
    "forced_eos_token_id": None,
}
ODD = {"d_model": 60, "encoder_attention_heads": 3, "decoder_attention_heads": 5, "encoder_layers": 3}
TINY = {
    "vocab_size": 96,
    "decoder_start_token_id": START,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": None,
}

T5, MT5 = T5ForConditionalGeneration, MT5ForConditionalGeneration
BART, MBART, MARIAN = BartForConditionalGeneration, MBartForConditionalGeneration, MarianMTModel
CASES: Cases = {
    "t5": (T5, T5_TINY),
    "t5-odd-heads": (T5, {**T5_TINY, "d_kv": 12, "num_heads": 5, "num_layers": 3, "num_decoder_layers": 2}),
    "t5-near": (T5, {**T5_TINY, "relative_attention_num_buckets": 8, "relative_attention_max_distance": 12}),
    "t5-1.1": (T5, {**T5_TINY, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}),
    "t5-own-head": (T5, {**T5_TINY, "feed_forward_proj": "gated-silu", "tie_word_embeddings": False, "own_head": True}),
    "mt5": (MT5, {**T5_TINY, "d_kv": 20, "num_heads": 3}),
    "mt5-gated": (MT5, {**T5_TINY, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}),
    "umt5": (UMT5ForConditionalGeneration, {**T5_TINY, "num_layers": 3, "num_decoder_layers": 2, "d_kv": 20}),
    "bart": (BART, BART_TINY),
    "plbart": (PLBartForConditionalGeneration, {**BART_TINY, "scale_embedding": True}),
    "bart-odd": (BART, {**BART_TINY, **ODD}),
    "bart-scaled": (BART, {**BART_TINY, "scale_embedding": True, "activation_function": "relu"}),
    "bart-untied": (BART, {**BART_TINY, "tie_word_embeddings": False}),
    "mbart": (MBART, {**BART_TINY, "scale_embedding": True}),
    "mbart-untied": (MBART, {**BART_TINY, **ODD, "tie_word_embeddings": False}),
    "marian": (MARIAN, {**BART_TINY, "activation_function": "swish", "scale_embedding": True}),
    "marian-two-vocabularies": (
        MARIAN,
        {**BART_TINY, "share_encoder_decoder_embeddings": False, "decoder_vocab_size": 101},
    ),
    "m2m100": (M2M100ForConditionalGeneration, {**BART_TINY, "scale_embedding": True}),
    "m2m100-plain": (M2M100ForConditionalGeneration, {**BART_TINY, "pad_token_id": 10, "activation_function": "gelu"}),
    "pegasus-odd": (PegasusForConditionalGeneration, {**BART_TINY, **ODD, "activation_function": "relu"}),
    "pegasus": (PegasusForConditionalGeneration, {**BART_TINY, "scale_embedding": True}),
}
checkpoints = checkpoints_of(CASES, TINY)


@pytest.mark.verifies("safetensors")
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_logits_and_greedy_tokens(checkpoints, backend, name):
    check_against_transformers(backend, checkpoints(name))


@pytest.mark.parametrize(("num_buckets", "max_distance"), [(32, 128), (8, 12), (64, 1000)])
@pytest.mark.parametrize("both_ways", [True, False])
def test_buckets_are_theirs_and_end_where_the_table_ends(num_buckets, max_distance, both_ways):
    distance = np.arange(-3 * max_distance, 3 * max_distance)
    theirs = T5Attention._relative_position_bucket(torch.from_numpy(distance), both_ways, num_buckets, max_distance)
    ours = bucket(distance, both_ways, num_buckets, max_distance)
    assert ours.tolist() == theirs.tolist()
    at_the_end = bucket(np.clip(distance, -max_distance, max_distance), both_ways, num_buckets, max_distance)
    assert at_the_end.tolist() == ours.tolist()


def test_waves_are_theirs():
    from transformers.models.m2m_100.modeling_m2m_100 import M2M100SinusoidalPositionalEmbedding
    from transformers.models.marian.modeling_marian import MarianSinusoidalPositionalEmbedding

    for columns in (64, 15):
        theirs = MarianSinusoidalPositionalEmbedding(40, columns).create_weight().numpy()
        np.testing.assert_array_equal(sinusoidal_positions(40, columns), theirs)
    theirs = M2M100SinusoidalPositionalEmbedding.get_embedding(40, 64).numpy()
    np.testing.assert_allclose(tensor2tensor_positions(40, 64), theirs, atol=4e-6)  # theirs are of angles in fp32
