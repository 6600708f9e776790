"""What a model is served for, and what is answered to those who ask it for something else."""

from typing import NamedTuple

from quire.client.service import ModelInfo
from quire.core.encode_request import Task
from quire.core.errors import BadRequest


class _TaskWords(NamedTuple):
    does: str
    hint: str


TASKS: dict[Task, _TaskWords] = {
    "generate": _TaskWords("generates text", "serve it with `--task embed`, or name an embedding model"),
    "embed": _TaskWords("embeds texts", "use /v1/embeddings, or name a model that generates text"),
    "score": _TaskWords("scores pairs of texts", "use /v1/rerank or /v1/score, or name another model"),
}


def check_task(info: ModelInfo, *tasks: Task) -> None:
    if info.task not in tasks:
        words = TASKS[info.task]
        raise BadRequest(f"`{info.name}` {words.does}, and does not {' or '.join(tasks)}", words.hint, param="model")
