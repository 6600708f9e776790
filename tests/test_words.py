"""Users read the field's words: messages, hints, help texts and logs have no retired ones (docs/glossary.md)."""

import ast
import gc
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import quire

ROOT = Path(quire.__file__).parent

# A retired word or phrase, as a regex -> what to say instead.
RETIRED = {
    "under way": "in flight",
    "realms?": "cache namespace",
    "languages?(?! models?)": "structured output",
    "(regular )?expressions?": "regex",
    "guided|guides?": "structured output, matcher",
    "letters?": "characters",
    "beginnings|(same|equal|common|shared) beginning": "prefix, prompt prefix",
    "halves|16-bit floats?|half floats?": "fp16, bf16",
    "codes": "quantized values, indices into a codebook",
    "(matrix )?products": "matmuls",
    "reads? (a )?texts?|reading (a )?texts?|vectors? of (a |the )?texts?|makes? vectors?": "embed, embedding",
    "guess(es|ed|ing)?": "draft tokens, speculative decoding",
    "(right|wrong) drafts?": "accepted, rejected draft tokens",
    "(draft|drafts'|its) trust": "acceptance rate",
    "cascades?": "shared-prefix group",
    "fetch(es|ed)? ahead": "prefetch",
    "turned|turning|still part": "rope part, nope part, rotate",
    "visits?|visitors?": "request, request context",
    "doors?": "listener",
    "patience": "timeout",
    "last words": "last output, keep-alive",
    "findings|parts found": "partial softmax",
    "low ranks": "LoRA adapters",
    "checkpoint's parts|later parts?": "shard, split",
    "nobody|somebody|whoever|whichever|likewise|of those": "name who or what is meant",
}
USER_KEYWORDS = {"help", "description", "message", "hint", "error", "reason"}
LOG_METHODS = {"debug", "info", "warning", "error", "exception", "critical"}


@cache
def nodes() -> list[tuple[Path, ast.AST]]:
    """All nodes of all files. To parse them takes seconds, and every worker imports this file."""
    gc.disable()  # to look through a million nodes for garbage takes as long again
    trees = {path: ast.parse(path.read_text()) for path in sorted(ROOT.rglob("*.py"))}
    found = [(path, node) for path, tree in trees.items() for node in ast.walk(tree)]
    gc.freeze()
    gc.enable()
    return found


def classes() -> list[ast.ClassDef]:
    return [node for _, node in nodes() if isinstance(node, ast.ClassDef)]


def name_of(node: ast.expr) -> str:
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


@cache
def error_names() -> set[str]:
    """QuireError and all classes that derive from it."""
    names, known = {"QuireError"}, classes()
    while more := {c.name for c in known if any(name_of(base) in names for base in c.bases)} - names:
        names |= more
    return names


@cache
def help_positions() -> dict[str, int]:
    """Functions and classes with a parameter or field `help` -> its position."""
    parameters = {
        node.name: [a.arg for a in node.args.args] for _, node in nodes() if isinstance(node, ast.FunctionDef)
    }
    for each in classes():
        parameters[each.name] = [name_of(node.target) for node in each.body if isinstance(node, ast.AnnAssign)]
    return {name: names.index("help") for name, names in parameters.items() if "help" in names}


def user_values(path: Path, node: ast.AST) -> list[ast.expr]:
    """The values within a node that users read."""
    if isinstance(node, ast.Assign):
        names = {name_of(target) for target in node.targets}
        constant = path.parent.name == "cli" and all(map(str.isupper, names))
        return [node.value] if constant or names & {"message", "hint", "problem"} else []
    if isinstance(node, ast.Dict):
        return [value for key, value in zip(node.keys, node.values, strict=True) if _is_text(key, "help")]
    if not isinstance(node, ast.Call):
        return []
    parts = [keyword.value for keyword in node.keywords if keyword.arg in USER_KEYWORDS]
    name = name_of(node.func)
    if name in error_names():
        parts += node.args[:2]
    elif (position := help_positions().get(name)) is not None:
        parts += node.args[position : position + 1]
    elif name in LOG_METHODS and isinstance(node.func, ast.Attribute) and "log" in name_of(node.func.value):
        parts += node.args[:1]
    elif name in ("print", "Parser"):
        parts += node.args
    return parts


def _is_text(node: ast.expr | None, text: str) -> bool:
    return isinstance(node, ast.Constant) and node.value == text


def user_strings() -> Iterator[tuple[str, str]]:
    """`file:line`, and a text. Of an f-string, only its literal parts."""
    for path, node in nodes():
        for value in user_values(path, node):
            for part in ast.walk(value):
                if isinstance(part, ast.Constant) and isinstance(part.value, str):
                    yield f"{path.relative_to(ROOT)}:{part.lineno}", part.value


def test_the_strings_are_found() -> None:
    texts = [text for _, text in user_strings()]
    assert len(texts) > 500
    for known in ("the model has no eos token", "tokens a block of the KV cache holds", "two tools have the same name"):
        assert any(known in text for text in texts), known


def test_users_do_not_read_retired_words() -> None:
    patterns = {re.compile(rf"(?<![\w`-])(?:{word})(?![\w`-])", re.IGNORECASE): RETIRED[word] for word in RETIRED}
    offenders = [
        f'{place}: "{match[0]}": say {instead}\n    {text.strip()}'
        for place, text in user_strings()
        for pattern, instead in patterns.items()
        for match in pattern.finditer(text)
    ]
    assert not offenders, "\n".join(["retired words in texts that users read:", *dict.fromkeys(offenders)])
