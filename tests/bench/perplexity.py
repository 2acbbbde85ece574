"""How much a file's types cost: perplexity of the demo's held-out replies, for files of one model in several types.

    python -m tests.bench.perplexity demo/target demo-Q8_0.gguf demo-Q4_K_M.gguf

The first may be the folder that the files were made of; its tokenizer serves all, as GGUF has no name for the demo's.
Prompts are fed, replies are judged.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from slipstream.engine.models.reading.documents import text_source
from slipstream.engine.models.registry import load_network, read_model
from slipstream.engine.text.tokenizer import Tokenizer
from slipstream.kernels import select
from slipstream.kernels.matmul.quantized import round_inputs
from tests.oracle.feeding import Runner
from tests.oracle.lossless import demo_prompt
from tests.process import ROOT

CPU = torch.device("cpu")
N_TASKS, N_CTX = 24, 1024


def perplexity(path: Path, tokenizer: Tokenizer, *, rounds: bool = False) -> float:
    """Of the replies to the demo's tasks, in the dtype that a server would take. rounds: `--round-activations`."""
    dtype = read_model(path).dtype
    round_inputs(rounds)
    for one in (torch.float32, dtype):
        select(CPU, one)
    network = load_network(path, dtype, CPU, N_CTX, tokenizer.vocab_size)
    lost, n = 0.0, 0
    lines = (ROOT / "demo" / "tasks.jsonl").read_text().splitlines()
    for task in map(json.loads, lines[:: max(1, len(lines) // N_TASKS)]):
        prompt = list(demo_prompt(tokenizer, task["messages"]))
        reply = tokenizer.encode(task["reference"], add_special=False)
        ids = [*prompt, *reply][:N_CTX]
        logits = Runner(network).feed_chunks(0, ids, [len(ids)]).float()  # [len(ids), vocab]
        judging = logits[len(prompt) - 1 : -1].log_softmax(-1)  # [n of the reply, vocab]
        judged = torch.tensor(ids[len(prompt) :])
        lost -= float(judging[torch.arange(len(judged)), judged].sum())
        n += len(judged)
    return math.exp(lost / n)


def main(names: Sequence[str]) -> int:
    if not names:
        sys.stderr.write(f"{__doc__}\n")
        return 2
    tokenizer = Tokenizer(text_source(Path(names[0])))
    first = perplexity(Path(names[0]), tokenizer)
    for name in names:
        found = first if name == names[0] else perplexity(Path(name), tokenizer)
        line = f"{Path(name).name:40} {found:8.4f}  {found / first - 1:+.2%}"
        scheme = read_model(Path(name)).quantization
        if scheme is not None and scheme.has_integers:
            rounded = perplexity(Path(name), tokenizer, rounds=True)
            line += f"  rounded activations {rounded:8.4f}  {rounded / found - 1:+.2%}"
        sys.stdout.write(f"{line}\n")
        sys.stdout.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
