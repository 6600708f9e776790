"""How a query and a document become one text, for decoders that score pairs."""

import re

from quire.core.errors import Unsupported
from quire.text.chat.chat_template import ChatTemplate
from quire.text.tokenizers.tokenizer import Tokenizer

ANSWERS = ("yes", "no")
INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
# Qwen3-Reranker was trained with it, and has no template of its own that does this.
QWEN3_RERANKER = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
    "<Instruct>: " + INSTRUCTION + "\n<Query>: {{ messages[0].content }}\n<Document>: {{ messages[1].content }}"
    "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n{{ '\n' }}"  # Jinja drops one newline at the end
)


def answer_tokens(tokenizer: Tokenizer) -> tuple[int, int]:
    """The tokens `yes` and `no`, by whose logits a model scores that names no others."""
    ids = [tokenizer.encode(word, add_special_tokens=False) for word in ANSWERS]
    if any(len(tokens) != 1 or tokenizer.decode(tokens) != word for tokens, word in zip(ids, ANSWERS, strict=True)):
        raise Unsupported(
            f"a score is the logit of `{ANSWERS[0]}` less that of `{ANSWERS[1]}`, and these are no single tokens here",
            "use a reranker",
        )
    return ids[0][0], ids[1][0]


def pair_template(tokenizer: Tokenizer, asked: bool) -> str | None:
    """The model's chat template, if it has the roles query and document, as sentence-transformers uses it; of a model
    that is `asked` for an answer, that of Qwen3-Reranker. None: the tokenizer puts the two texts together."""
    own = tokenizer.chat_template or ""
    if all(re.search(f"[\"']{role}[\"']", own) for role in ("query", "document")):
        return own
    return QWEN3_RERANKER if asked else None


def encode_by_template(
    tokenizer: Tokenizer, template: str, query: str, document: str, limit: int | None = None
) -> list[int]:
    """The ids of a pair. With `limit`, at most so many: the document is cut at its end, and what follows it stays."""
    chat = ChatTemplate(template, tokenizer.bos_token, tokenizer.eos_token)

    def encode(document: str) -> list[int]:
        pair = [{"role": "query", "content": query}, {"role": "document", "content": document}]
        return tokenizer.encode(chat.render(pair), add_special_tokens=False)

    ids = encode(document)
    kept = tokenizer.encode(document, add_special_tokens=False)
    while limit is not None and len(ids) > limit and kept:
        kept = kept[: max(len(kept) - (len(ids) - limit), 0)]
        ids = encode(tokenizer.decode(kept))
    return ids
