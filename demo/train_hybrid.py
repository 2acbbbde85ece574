"""Train the demo's hybrid target, and then the multi-token-prediction layer that its checkpoint ships.

Run as `python -m demo.train_hybrid` once the demo's target is trained; an interrupted run goes on. The first rows
are learnt as they are; after that the hybrid follows the target's distributions, over real code and the target's
own answers, which takes far fewer tokens than starting from the text alone.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional as F

from demo import checkpoint, curriculum, evaluate_heads
from demo.curriculum import Batch, Row
from demo.head_rows import Mixture, write_answers
from demo.head_training import DTYPE, chain_loss, divergence, thin
from demo.heads import initialise
from demo.hybrid_mtp import HybridMtp
from demo.hybrid_network import HybridNetwork, HybridShape
from demo.loop import Loop, Task
from demo.network import Network
from demo.tokenizer import VOCAB_SIZE
from demo.train import check_target, options, prepare_tokenizer
from demo.train_heads import depth

HYBRID_SHAPE = HybridShape(
    vocab_size=VOCAB_SIZE,
    hidden_size=320,
    intermediate_size=384,
    num_hidden_layers=4,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=256,
)
DEFAULT_MINUTES = 50.0
# What the prediction layer gets of them.
MTP_SHARE = 0.22
# Up to here the rows are copies, whose answers are certain; a teacher would only cost time.
PLAIN_UNTIL = 0.10
ANSWERS_FROM = 0.30
ANSWER_SHARE = 0.3
CHECKED_TASKS = 10


def hybrid_loss(
    teacher: Network, taught: Callable[[], bool]
) -> Callable[[HybridNetwork, Tensor, Tensor], Tensor]:
    """The loss over (network, tokens, weights [B, T + 1]): divergence from the teacher if taught, else cross-entropy.

    Not compiled: the hybrid is no quicker for it.
    """

    def loss(network: HybridNetwork, tokens: Tensor, weights: Tensor) -> Tensor:
        before, after = tokens[:, :-1], tokens[:, 1:].flatten()
        wanted = thin(weights[:, 1:].flatten()[None])[0]  # [B * T]
        rows = wanted.nonzero()[:, 0]  # [N]
        given = network.logits(network(before, DTYPE).flatten(0, 1)[rows])  # [N, V]
        if taught():
            with torch.no_grad():
                known = teacher.logits(teacher(before, DTYPE).flatten(0, 1)[rows])  # [N, V]
            losses = divergence(known, given)  # [N]
        else:
            losses = F.cross_entropy(given.float(), after[rows], reduction="none")  # [N]
        return (losses * wanted[rows]).sum() / wanted.sum()

    return loss


def hybrid_task(loop: Loop[HybridNetwork], teacher: Network, tokenizer: Tokenizer, rows: list[Row]) -> Task:
    """The curriculum of the demo's target, later with the teacher's answers among it."""
    mixture = Mixture(tokenizer, rows, loop.clock.steps, curriculum.STAGES)

    def batch(progress: float) -> Batch:
        if progress < ANSWERS_FROM or mixture.curriculum.rng.random() >= ANSWER_SHARE:
            return mixture.curriculum.batch(progress)
        return mixture.answered()

    def check() -> str:
        return check_target(loop.network, tokenizer)

    return Task(hybrid_loss(teacher, lambda: loop.clock.progress >= PLAIN_UNTIL), batch, check)


def mtp_task(loop: Loop[HybridMtp], target: HybridNetwork, tokenizer: Tokenizer, rows: list[Row]) -> Task:
    """The layer is unrolled on its own outputs, as drafting uses it, against the frozen target."""

    def check() -> str:
        found = evaluate_heads.measure(target, loop.network, tokenizer, "continue", CHECKED_TASKS)
        return f"mtp: acceptance length {found.length:.2f} over {found.tokens} tokens"

    loss = chain_loss(target, lambda: depth(loop.clock.progress))
    return Task(loss, Mixture(tokenizer, rows, loop.clock.steps).batch, check)


def main() -> None:
    """Train both, or only export what there is."""
    arguments = options(__doc__, DEFAULT_MINUTES, "hybrid").parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    tokenizer = prepare_tokenizer(arguments.work)
    teacher = checkpoint.load(arguments.out.parent / "target").to(arguments.device)
    teacher.requires_grad_(requires_grad=False)
    rows = write_answers(teacher, tokenizer, arguments.work / "answers-heads")
    network = HybridNetwork(HYBRID_SHAPE)
    minutes = arguments.minutes * (1.0 - MTP_SHARE)
    loop = Loop(network, arguments.work / "hybrid.pt", minutes, arguments.device)
    if not arguments.export_only:
        loop.run(hybrid_task(loop, teacher, tokenizer, rows))
    # The draft can be distilled on it from here on.
    checkpoint.export(network, arguments.out, arguments.work / "tokenizer")
    network.requires_grad_(requires_grad=False)
    mtp = HybridMtp(HYBRID_SHAPE)
    initialise(mtp, network)
    minutes = arguments.minutes * MTP_SHARE
    ahead = Loop(mtp, arguments.work / "hybrid-mtp.pt", minutes, arguments.device)
    if not arguments.export_only:
        ahead.run(mtp_task(ahead, network, tokenizer, rows))
    checkpoint.export(network, arguments.out, arguments.work / "tokenizer", mtp.state_dict())
    loop.write_summary(arguments.out, mtp=ahead.summary())


if __name__ == "__main__":
    main()
