"""The model cards of target and draft, filled in by the evaluation."""

from __future__ import annotations

import json
from pathlib import Path

from demo.acceptance import DRAFT_TOKENS, Acceptance
from demo.checkpoint import parameter_count
from demo.hybrid_network import HybridShape
from demo.network import Network, Shape

HEADER = """\
---
license: apache-2.0
language: [code, en]
library_name: transformers
pipeline_tag: text-generation
---

"""
TARGET = """\
# Slipstream demo target

A {parameters:.2f} M parameter model in the Qwen3 architecture, trained from nothing on the source of
Python's standard library. It renames identifiers, continues code and writes docstrings, each about as well as
its size allows. It exists so that speculative decoding can be shown, tested and measured without a download;
it is not meant for anything else.

| | |
|---|---|
| Architecture | {shape} |
| Vocabulary | byte-level BPE of {vocabulary} |
| Weights | bfloat16, tied embeddings |
| Training | {tokens:.1f} M predicted tokens in {steps} steps, {cpu_minutes:.0f} minutes on one CPU thread |
| Training loss at the end | {loss:.3f} |

## Evaluation

Greedy decoding of the bfloat16 weights, on functions of modules that were never trained on. Similarity is
difflib's ratio of the answer to the exact expected text, averaged over the tasks.

| Task | Tasks | Similarity | Exact |
|---|---|---|---|
| Rename, up to 12 lines | {rename_tasks} | {rename_similarity:.3f} | {rename_exact} |
| Rename, 13 to 24 lines | {long_rename_tasks} | {long_rename_similarity:.3f} | {long_rename_exact} |

| Loss of the reference answer (nats per token) | |
|---|---|
| Rename | {rename_loss:.3f} |
| Continue | {continue_loss:.3f} |
| Docstring | {docstring_loss:.3f} |

`python -m demo.evaluate` measures these figures anew and writes this card; `python -m demo.train` trains anew.
The shares and weights of the curriculum were adjusted during this run, so a new one follows the same plan but
not the same steps.

## Prompts

The chat template is ChatML. The three requests it was trained on:

- ``Rename `old` to `new` in this function:`` and the function on the next lines
- `Continue this code:` and the first lines of a function
- `Write the docstring of this function:` and the function
"""
DRAFT = """\
# Slipstream demo {name}

A {parameters:.2f} M parameter draft for the demo {target}, in the {family} architecture with the same tokenizer.
It was distilled on the target's distributions, over real code and over text that the target wrote.

| | |
|---|---|
| Architecture | {shape} |
| Weights | bfloat16, tied embeddings |
| Training | {tokens:.1f} M predicted tokens in {steps} steps, {cpu_minutes:.0f} minutes on one CPU thread |
| Divergence from the target at the end of training | {loss:.3f} nats per token |

## Evaluation

The target answers the short held-out tasks of `demo/tasks.jsonl` greedily. Agreement is the share of its tokens
that are the draft's first choice, acceptance length the tokens per target pass (with the target's own) when
the draft proposes {draft_tokens} at a time. A target of this size loops in some of its continuations, and loops
are easy to draft; the last two columns therefore compare the two models' first choices along the reference
answers instead.

| Task | Agreement | Acceptance length | Agreement on references | Acceptance length on references |
|---|---|---|---|---|
{rows}

`python -m demo.{evaluate}` measures these figures anew and writes this card; `python -m demo.{distil}` distils
anew.
"""
# What the draft's card calls things, by folder.
DRAFT_NAMES = {
    "draft": {"target": "target", "family": "Qwen3", "evaluate": "evaluate", "distil": "distill"},
    "hybrid-draft": {
        "target": "hybrid",
        "family": "Qwen3.5",
        "evaluate": "evaluate_hybrid",
        "distil": "distill_hybrid",
    },
}


def write_target(folder: Path, network: Network, figures: dict[str, float]) -> None:
    """Write the target's card beside its weights."""
    text = TARGET.format(**facts(folder, network), **figures)
    (folder / "README.md").write_text(HEADER + text)


def write_draft(folder: Path, network: Network, figures: dict[str, Acceptance]) -> None:
    """Write the draft's card beside its weights."""
    rows = "\n".join(
        f"| {kind.capitalize()} | {found.agreement:.3f} | {found.length:.2f} "
        f"| {found.reference_agreement:.3f} | {found.reference_length:.2f} |"
        for kind, found in figures.items()
    )
    text = DRAFT.format(
        **facts(folder, network),
        **DRAFT_NAMES[folder.name],
        name=folder.name,
        rows=rows,
        draft_tokens=DRAFT_TOKENS,
    )
    (folder / "README.md").write_text(HEADER + text)


def described(shape: Shape) -> str:
    """The dimensions in words."""
    text = (
        f"{shape.num_hidden_layers} layers, hidden size {shape.hidden_size}, feed-forward "
        f"{shape.intermediate_size}, {shape.num_attention_heads} query and "
        f"{shape.num_key_value_heads} key heads of {shape.head_dim}"
    )
    if not isinstance(shape, HybridShape):
        return text
    return (
        f"{text} in every {shape.full_attention_interval}th layer, the others gated delta nets of "
        f"{shape.linear_num_key_heads} key and {shape.linear_num_value_heads} value heads of "
        f"{shape.linear_key_head_dim}"
    )


def facts(folder: Path, network: Network) -> dict[str, object]:
    """What a card says of a checkpoint without measuring anything."""
    shape = network.shape
    training = json.loads((folder / "training.json").read_text())
    return {
        "parameters": parameter_count(network) / 1e6,
        "vocabulary": f"{shape.vocab_size:,}",
        "shape": described(shape),
        "tokens": training["tokens"] / 1e6,
        "steps": training["steps"],
        "cpu_minutes": training["cpu_minutes"],
        "loss": training["loss"],
    }
