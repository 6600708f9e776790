"""EleutherAI's lm-eval, with small tasks: it tokenizes by asking the server, and scores what the server says."""

import json
import math
from typing import Any

import lm_eval
import pytest
from lm_eval.tasks import TaskManager

QUESTIONS = [
    {"question": "The capital of France is", "choices": ["Paris", "seventeen"], "answer": 0},
    {"question": "Two and two make", "choices": ["horse", "four"], "answer": 1},
    {"question": "The opposite of hot is", "choices": ["cold", "Tuesday"], "answer": 0},
]

CHOOSE = """
task: choose
dataset_path: json
dataset_kwargs: {{data_files: {file}}}
test_split: train
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: choices
doc_to_target: answer
metric_list: [{{metric: acc}}]
"""

SAY = """
task: say
dataset_path: json
dataset_kwargs: {{data_files: {file}}}
test_split: train
output_type: generate_until
doc_to_text: "Repeat the word: {{{{choices[answer]}}}}"
doc_to_target: "{{{{choices[answer]}}}}"
generation_kwargs: {{until: ["\\n"], max_gen_toks: 8}}
metric_list: [{{metric: exact_match}}]
"""


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> TaskManager:
    folder = tmp_path_factory.mktemp("tasks")
    file = folder / "questions.jsonl"
    file.write_text("\n".join(map(json.dumps, QUESTIONS)))
    for name, text in (("choose", CHOOSE), ("say", SAY)):
        (folder / f"{name}.yaml").write_text(text.format(file=file))
    return TaskManager(include_path=str(folder), include_defaults=False)


def evaluated(model: str, url: str, tasks: TaskManager, task: str, **more: Any) -> dict[str, Any]:
    args = {"model": "smollm2", "base_url": url, "num_concurrent": 2, "max_retries": 1, "timeout": 60}
    found: dict[str, Any] = lm_eval.simple_evaluate(
        model=model, model_args=args, tasks=[task], task_manager=tasks, bootstrap_iters=0, log_samples=True, **more
    )
    return found


def test_choices_are_scored_by_their_logprobs(address: str, tasks: TaskManager) -> None:
    found = evaluated("local-completions", f"{address}/v1/completions", tasks, "choose")
    assert found["results"]["choose"]["acc,none"] == 1.0, "even the smallest model knows as much"
    for sample in found["samples"]["choose"]:
        assert all(math.isfinite(score) and score < 0 for score, _ in sample["filtered_resps"])


def test_answers_are_generated(address: str, tasks: TaskManager) -> None:
    where = f"{address}/v1/chat/completions"
    found = evaluated("local-chat-completions", where, tasks, "say", apply_chat_template=True)
    answers = [sample["resps"][0][0] for sample in found["samples"]["say"]]
    assert len(answers) == 3 and all(answers) and not any("\n" in answer for answer in answers)
