"""Distil the demo's hybrid draft on the hybrid target's distributions and on text that the hybrid wrote.

Run as `python -m demo.distill_hybrid` once the hybrid is trained; an interrupted run goes on.
"""

from __future__ import annotations

import logging

import torch

from demo import acceptance, checkpoint
from demo.curriculum import Curriculum
from demo.distill import STAGES, Answers, Mixture
from demo.hybrid_network import HybridNetwork, HybridShape
from demo.loop import Loop, Task
from demo.tokenizer import VOCAB_SIZE
from demo.train import options, prepare_tokenizer
from demo.train_hybrid import hybrid_loss

# Two key heads, each read by two value heads: what a loader may get wrong shows here.
DRAFT_SHAPE = HybridShape(
    vocab_size=VOCAB_SIZE,
    hidden_size=128,
    intermediate_size=256,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=64,
    linear_key_head_dim=64,
    linear_value_head_dim=64,
    linear_num_key_heads=2,
    linear_num_value_heads=4,
)
DEFAULT_MINUTES = 14.0


def main() -> None:
    """Distil, or only export what there is."""
    arguments = options(__doc__, DEFAULT_MINUTES, "hybrid-draft").parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    tokenizer = prepare_tokenizer(arguments.work)
    target = checkpoint.load(arguments.out.parent / "hybrid").to(arguments.device)
    target.requires_grad_(requires_grad=False)
    file = arguments.work / "hybrid-draft.pt"
    loop = Loop(HybridNetwork(DRAFT_SHAPE), file, arguments.minutes, arguments.device)

    def check() -> str:
        found = acceptance.measure(target, loop.network, tokenizer, "continue")
        return f"continue agreement {found.agreement:.3f}, acceptance length {found.length:.2f}"

    if not arguments.export_only:
        seed = loop.clock.steps
        answers = Answers(target, tokenizer, seed)
        mixture = Mixture(Curriculum(tokenizer, seed, STAGES), answers, arguments.work / "answers-hybrid.pt")
        loop.run(Task(hybrid_loss(target, lambda: True), mixture.batch, check))
    checkpoint.export(loop.network, arguments.out, arguments.work / "tokenizer")
    loop.write_summary(arguments.out)


if __name__ == "__main__":
    main()
