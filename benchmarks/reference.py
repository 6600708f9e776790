"""A GGUF file's model in transformers, from weights that `quire.ops.dequantize` took apart."""

from pathlib import Path
from typing import Any

from quire.ops.dequantize import dequantize
from quire.weights.checkpoint import open_checkpoint


def reference_model(path: Path) -> Any:
    """The architecture's class of transformers, in fp32, with the checkpoint's numbers."""
    import torch
    import transformers

    checkpoint = open_checkpoint(path)
    config = checkpoint.config
    architecture = getattr(transformers, config.architecture)
    model = architecture(
        architecture.config_class(
            vocab_size=config.int("vocab_size"),
            hidden_size=config.int("hidden_size"),
            intermediate_size=config.int("intermediate_size"),
            num_hidden_layers=config.int("num_hidden_layers"),
            num_attention_heads=config.int("num_attention_heads"),
            num_key_value_heads=config.int("num_key_value_heads"),
            max_position_embeddings=config.int("max_position_embeddings"),
            rms_norm_eps=config.float("rms_norm_eps"),
            rope_theta=config.float("rope_theta"),
            tie_word_embeddings=config.bool("tie_word_embeddings"),
        )
    )
    state = {}
    for name in checkpoint.names():
        tensor = checkpoint.tensor(name)
        state[name] = torch.tensor(dequantize(tensor).reshape(tensor.shape))
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert not unexpected and set(missing) <= {"lm_head.weight"}, (missing, unexpected)
    model.tie_weights()
    return model.eval()
