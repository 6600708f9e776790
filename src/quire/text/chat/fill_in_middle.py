"""Fill-in-the-middle (FIM) prompts of code models."""

from quire.text.tokenizers.tokenizer import Tokenizer

# The tokens before the prefix, the suffix and the middle.
_FIM_TOKENS = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen Coder, CodeGemma
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder, Granite Code
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # DeepSeek Coder
    ("▁<PRE>", "▁<SUF>", "▁<MID>"),  # CodeLlama
)

# Other tokens that such a model writes after the middle.
_END_TOKENS = ("<|endoftext|>", "<|fim_pad|>", "<|file_sep|>", "<|repo_name|>", "<file_sep>", "<fim_pad>", "▁<EOT>")


def fim_stop_ids(tokenizer: Tokenizer) -> list[int]:
    """Tokens that end the middle: another file or another gap begins."""
    names = {*_END_TOKENS, *(name for names in _FIM_TOKENS for name in names)}
    return sorted(token for name in names if (token := tokenizer.id_of(name)) is not None)


def fim_prompt(tokenizer: Tokenizer, prefix: str, suffix: str) -> list[int] | None:
    """The prompt whose continuation is the middle; None if the model has no FIM tokens."""
    for names in _FIM_TOKENS:
        ids = [tokenizer.id_of(name) for name in names]
        if None not in ids:
            before, between, after = (token for token in ids if token is not None)
            begin = [] if tokenizer.bos_id is None else tokenizer.encode("")[:1]
            parts = [tokenizer.encode(text, add_special_tokens=False) for text in (prefix, suffix)]
            return [*begin, before, *parts[0], between, *parts[1], after]
    return None
