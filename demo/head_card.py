"""The model cards of the draft heads, filled in by their evaluation."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from demo import head_files
from demo.acceptance import DRAFT_TOKENS
from demo.card import HEADER
from demo.heads import DFlashHead, DSparkHead, Eagle3Head

if TYPE_CHECKING:
    from demo.evaluate_heads import Found

TITLES = {
    "eagle3": "an EAGLE-3 head in SpecForge's layout",
    "mtp": "a multi-token-prediction layer in MiMo-7B's layout",
    "dflash": "a one-layer DFlash block drafter in z-lab's layout",
    "dspark": "the two small heads that make a DSpark of the frozen `demo/dflash`",
}
DSPARK_CONVENTIONS = (
    (
        "Files",
        "only the tensors that DSpark adds; `python -m demo.assemble_dspark FOLDER` writes the whole checkpoint,"
        " with those of `demo/dflash`",
    ),
    (
        "Correction",
        f"`markov_w2 · markov_w1[token before]`, of rank {head_files.MARKOV_RANK}, is added to a row's logits,"
        " from left to right",
    ),
    (
        "Confidence",
        "sigmoid of `proj` over [the row after the final norm, `markov_w1` of the token before]: trained on the"
        " overlap of the two distributions",
    ),
)
MEASURE = "Divergence from the target"
CARD = """\
# Slipstream demo: {name}

A {parameters:.2f} M parameter draft head for the demo target in `demo/target`: {title}.
It uses the target's embeddings{output} and tokenizer, and is of no use without the target.

| | |
|---|---|
{conventions}
| Weights | bfloat16, {size:.2f} MB |
| Training | {tokens:.1f} M weighted tokens in {steps} steps, {cpu_minutes:.0f} minutes on one CPU thread |
| {measure} at the end of training | {loss:.3f} nats per drafted token |

It was trained on the frozen target's distributions, mostly over the target's own answers to training tasks, for a
quarter over real code.

## Evaluation

The target answers the first 30 held-out tasks of each kind in `demo/tasks.jsonl` greedily; acceptance length is the
number of tokens per target pass, with the target's own, when the head drafts up to {drafted} tokens a pass. An
answer counts up to where it starts to loop (an 8-gram is seen for the third time), without its first token, which
comes from the prompt's own pass.

| Task | Acceptance length | Tokens | The first drafts are right, each given those before it |
|---|---|---|---|
{rows}

`python -m demo.evaluate_heads` measures these figures anew and writes this card; `python -m demo.train_heads`
trains anew.
"""


def conventions(head: head_files.Head) -> list[tuple[str, str]]:
    """What a loader must get right."""
    if isinstance(head, Eagle3Head):
        return [
            (
                "Target states",
                _taps(head_files.EAGLE_LAYERS, head_files.EAGLE_TAPS) + ", concatenated, not normed",
            ),
            ("Pairing", "the states of position p with the token at p + 1 predict the token at p + 2"),
            ("Carried on", "the layer's output before the final norm"),
            ("Draft vocabulary", f"{len(head.d2t):,} tokens; target id = draft id + `d2t`"),
        ]
    if isinstance(head, DFlashHead):
        return [
            *(DSPARK_CONVENTIONS if isinstance(head, DSparkHead) else ()),
            (
                "Target states",
                _taps(head_files.DFLASH_LAYERS, head_files.DFLASH_TAPS) + ", concatenated, not normed",
            ),
            (
                "Block",
                f"{head_files.BLOCK_SIZE} rows: the newest token and masks (id {head_files.MASK_TOKEN})",
            ),
            (
                "Pairing",
                "row i predicts the token at its own position; the newest token is at n, context is 0 to n - 1",
            ),
        ]
    return [
        ("Target state", "after the final norm"),
        ("Pairing", "the state of position p with the token at p + 1 predict the token at p + 2"),
        ("Input", "`input_proj` of [state, embedding], each with its own norm"),
        ("Carried on", "the output after `final_layernorm`"),
    ]


def write(folder: Path, head: head_files.Head, figures: dict[str, Found]) -> None:
    """Write the card beside the weights."""
    training = json.loads((folder / "training.json").read_text())
    rows = "\n".join(
        f"| {kind.capitalize()} | {found.length:.2f} | {found.tokens} "
        f"| {', '.join(f'{rate:.2f}' for rate in found.by_place[:4])} |"
        for kind, found in figures.items()
    )
    text = CARD.format(
        name=folder.name,
        title=TITLES[folder.name],
        parameters=head_files.parameter_count(head) / 1e6,
        output="" if isinstance(head, Eagle3Head) else ", output matrix",
        conventions="\n".join(f"| {key} | {value} |" for key, value in conventions(head)),
        size=(folder / "model.safetensors").stat().st_size / 1e6,
        tokens=training["tokens"] / 1e6,
        steps=training["steps"],
        cpu_minutes=training["cpu_minutes"],
        measure=MEASURE + (", and cross-entropy of the confidence," if isinstance(head, DSparkHead) else ""),
        loss=training["loss"],
        drafted=min(DRAFT_TOKENS, head_files.BLOCK_SIZE - 1)
        if isinstance(head, DFlashHead)
        else DRAFT_TOKENS,
        rows=rows,
    )
    (folder / "README.md").write_text(HEADER.replace("pipeline_tag: text-generation\n", "") + text)


def _taps(layers: list[int], taps: list[int]) -> str:
    return f"outputs of layers {layers} (counted from 0), transformers' `hidden_states` {taps}"
