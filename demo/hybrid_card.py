"""The model card of the hybrid target, filled in by its evaluation."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from demo import hybrid_mtp
from demo.acceptance import DRAFT_TOKENS
from demo.card import HEADER, facts
from demo.head_files import parameter_count
from demo.network import Network

if TYPE_CHECKING:
    from demo.evaluate_heads import Found

CARD = """\
# Slipstream demo hybrid

A {parameters:.2f} M parameter model in the Qwen3.5 architecture with the tokenizer of `demo/target`, and a
multi-token-prediction layer of {mtp_parameters:.2f} M that comes in the same file under `mtp.`. It is taught the
demo target's tasks, with one layer in four that attends; it exists so that speculation on recurrent layers can be
shown, tested and measured without a download, and is not meant for anything else.

| | |
|---|---|
| Architecture | {shape} |
| Vocabulary | byte-level BPE of {vocabulary} |
| Weights | bfloat16, tied embeddings |
| Training | {tokens:.1f} M weighted tokens in {steps} steps, {cpu_minutes:.0f} minutes on one CPU thread |
| Divergence from the demo target at the end of training | {loss:.3f} nats per token |
| Training of the prediction layer | {mtp[steps]} steps, {mtp[cpu_minutes]:.0f} minutes on one CPU thread |
| Its divergence from the hybrid | {mtp[loss]:.3f} nats per drafted token |

The first tenth of the run learnt copies from the text itself; after that the model followed the demo target's
distributions, over real code and over the target's answers to training tasks. The prediction layer was then trained
on the frozen hybrid, unrolled up to four steps on its own outputs. The budget was adjusted during this run,
so a new one follows the same plan but not the same steps.

## Evaluation

Greedy decoding of the bfloat16 weights, on functions of modules that were never trained on. Similarity is
difflib's ratio of the answer to the exact expected text, averaged over the tasks.

| Task | Tasks | Similarity | Exact |
|---|---|---|---|
| Rename, up to 12 lines | {rename_tasks} | {rename_similarity:.3f} | {rename_exact} |
| Rename, 13 to 24 lines | {long_rename_tasks} | {long_rename_similarity:.3f} | {long_rename_exact} |

A copy without any renaming would reach {copy_similarity:.3f} on the first row. The hybrid copies well and replaces
names less reliably: over those tasks it writes the new name in {names_written} of {names_wanted} places.

| Loss of the reference answer (nats per token) | |
|---|---|
| Rename | {rename_loss:.3f} |
| Continue | {continue_loss:.3f} |
| Docstring | {docstring_loss:.3f} |

### The prediction layer

The state after the final norm at position p and the embedding of the token at p + 1, each normed and joined as
[embedding, state], predict the token at p + 2; carried on is the output after `mtp.norm`. Acceptance length is the
number of tokens per target pass, with the target's own, when the layer drafts {drafted} tokens a pass along the
hybrid's greedy answers to the first 30 held-out tasks of each kind. An answer counts up to where it starts to loop
(an 8-gram is seen for the third time), without its first token, which comes from the prompt's own pass. The last
column compares the two along the reference answers of the short tasks instead.

| Task | Acceptance length | Tokens | The first drafts are right, each given those before it | On references |
|---|---|---|---|---|
{rows}

`python -m demo.evaluate_hybrid` measures these figures anew and writes this card; `python -m demo.train_hybrid`
trains anew.
"""


def write(
    folder: Path, network: Network, figures: dict[str, float], mtp: tuple[dict[str, Found], dict[str, float]]
) -> None:
    """Write the card beside the weights; mtp are the layer's lengths on own answers and on references."""
    found, along = mtp
    rows = "\n".join(
        f"| {kind.capitalize()} | {one.length:.2f} | {one.tokens} "
        f"| {', '.join(f'{rate:.2f}' for rate in one.by_place[:4])} | {along[kind]:.2f} |"
        for kind, one in found.items()
    )
    text = CARD.format(
        **facts(folder, network),
        **figures,
        mtp=json.loads((folder / "training.json").read_text())["mtp"],
        mtp_parameters=parameter_count(hybrid_mtp.load(folder)) / 1e6,
        drafted=DRAFT_TOKENS,
        rows=rows,
    )
    (folder / "README.md").write_text(HEADER + text)
