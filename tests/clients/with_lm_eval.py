"""`lm-eval`: tasks of its own kinds over a local file, scored through log-probabilities and generated text.

It tokenizes through the server, as it does with vLLM's; so it needs no tokenizer and no library for one.
"""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import pytest

# Read when the libraries are imported.
os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}

import lm_eval
from lm_eval.tasks import TaskManager

# Contexts end where tokens end: the harness cuts the tokens of the whole text at the number of those of the context.
QUESTIONS = [
    {"text": "def add(", "choices": ["a, b):", "banana):", "7 8 9"], "answer": 0},
    {"text": "for i in range(", "choices": ["class)", "10):"], "answer": 1},
    {"text": "def square(x):\n    return x * x\n\ndef cube(", "choices": ["x):", '"")'], "answer": 0},
]
TASK = """
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: {kind}
doc_to_text: "{{{{text}}}}"
metadata: {{version: 1}}
"""
CHOICES = """
doc_to_choice: "{{choices}}"
doc_to_target: "{{answer}}"
target_delimiter: ""
metric_list: [{metric: acc}]
"""
WHOLE = """
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list: [{metric: word_perplexity}]
"""
TEXT = """
doc_to_target: "{{choices[answer]}}"
generation_kwargs: {until: ["\\n"], max_gen_toks: 16}
metric_list: [{metric: bypass}]
"""
KINDS = {"multiple_choice": CHOICES, "loglikelihood_rolling": WHOLE, "generate_until": TEXT}


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> TaskManager:
    folder = tmp_path_factory.mktemp("tasks")
    data = folder / "questions.jsonl"
    data.write_text("\n".join(json.dumps(one) for one in QUESTIONS))
    for kind, more in KINDS.items():
        task = TASK.format(name=kind, kind=kind, data=data) + more
        (folder / f"{kind}.yaml").write_text(task)
    return TaskManager(include_path=str(folder), include_defaults=False)


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Data sets that are read are not kept."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path))


def evaluate(
    url: str, kind: str, tasks: TaskManager, chat: bool = False, **model: Any
) -> list[dict[str, Any]]:
    """The harness's samples of a task."""
    path, name = (
        ("chat/completions", "local-chat-completions") if chat else ("completions", "local-completions")
    )
    found = lm_eval.simple_evaluate(
        model=name,
        model_args={"model": "demo", "base_url": f"{url}/{path}", "max_retries": 1, "timeout": 120, **model},
        tasks=[kind],
        task_manager=tasks,
        apply_chat_template=chat,
        bootstrap_iters=0,
        log_samples=True,
    )
    assert found is not None
    return sorted(found["samples"][kind], key=lambda one: one["doc_id"])


def answers(samples: list[dict[str, Any]]) -> list[Any]:
    return [one["filtered_resps"] for one in samples]


def test_choices_by_log_probability(url: str, tasks: TaskManager) -> None:
    samples = evaluate(url, "multiple_choice", tasks)
    for sample, question in zip(samples, QUESTIONS, strict=True):
        found = [(float(value), is_greedy) for value, is_greedy in sample["filtered_resps"]]
        assert len(found) == len(question["choices"])
        assert all(math.isfinite(value) and value < 0 for value, _ in found)
    assert sum(sample["acc"] for sample in samples) >= 2, "the demo model completes code"


@pytest.mark.parametrize("model", [{"num_concurrent": 4}, {"batch_size": 4}, {"tokenized_requests": False}])
def test_they_are_the_same_however_they_are_asked_for(url: str, tasks: TaskManager, model: Any) -> None:
    alone = evaluate(url, "multiple_choice", tasks)
    assert answers(evaluate(url, "multiple_choice", tasks, **model)) == answers(alone)


def test_the_text_as_a_whole(url: str, tasks: TaskManager) -> None:
    for sample in evaluate(url, "loglikelihood_rolling", tasks):
        (value,) = sample["filtered_resps"]
        assert math.isfinite(float(value))
        assert float(value) < 0


def test_generated_text(url: str, tasks: TaskManager) -> None:
    told = answers(evaluate(url, "generate_until", tasks))
    assert all(text and "\n" not in text for (text,) in told)
    assert answers(evaluate(url, "generate_until", tasks, num_concurrent=4)) == told
    assert answers(evaluate(url, "generate_until", tasks, batch_size=4)) == told


def test_chat(url: str, tasks: TaskManager) -> None:
    told = answers(evaluate(url, "generate_until", tasks, chat=True))
    assert all(isinstance(text, str) for (text,) in told)
    assert any(text for (text,) in told)
