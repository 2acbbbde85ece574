"""Every op at the shapes of a 0.6 B network (hidden 1024, 28 layers): time, bytes read a second, share of the limit.

    python -m tests.bench.kernels --threads 1 --dtype bfloat16

The limit is the rate at which oneDNN's prepacked linears read their weights for one row, measured first. Each line
works through six sets of tensors in turn, so that large ones come from memory as in a pass. Run nothing beside it.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from slipstream import kernels
from slipstream.engine.batch import Batch, Span
from slipstream.kernels.attention.op import attention
from slipstream.kernels.choose.op import Edits, Masks, RowParams, choose
from slipstream.kernels.gated.activation import SILU
from slipstream.kernels.gated.op import gated_mul
from slipstream.kernels.matmul import cpu as onednn
from slipstream.kernels.matmul.op import linear, pack
from slipstream.kernels.moe.op import Routing, experts, pack_experts, route
from slipstream.kernels.norm.op import add_rms_norm
from slipstream.kernels.norm_rope_write.op import HeadNorms, Rope, norm_rope_write
from tests.bench.recurrent import recurrent

N_SETS = 6
N_HEADS, N_KV_HEADS, D_HEAD, PAGE, VOCAB = 16, 8, 128, 16, 151_936
Work = Callable[[int], object]  # of the number of a set
Pairs = list[tuple[Tensor, Tensor]]  # keys and values of every set


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def seconds(work: Work, n_rounds: int = 9, share: float = 0.5) -> float:
    """Seconds of one call: the median, or another share, of the times of rounds through all sets."""
    times = []
    for i in range(n_rounds + 2):
        started = time.perf_counter()
        for one in range(N_SETS):
            work(one)
        if i >= 2:
            times.append((time.perf_counter() - started) / N_SETS)
    return sorted(times)[int(share * (n_rounds - 1))]


class Table:
    """Prints a line per measurement."""

    def __init__(self, limit: float, dtype: torch.dtype) -> None:
        self.limit = limit  # bytes a second
        self.dtype = dtype

    def line(self, name: str, work: Work, n_bytes: float = 0.0) -> float:
        took = seconds(work)
        rate = (
            f"{n_bytes / took / 1e9:7.1f} GB/s {n_bytes / took / self.limit:5.2f} of the limit"
            if n_bytes
            else ""
        )
        say(f"{name:44} {1e6 * took:9.1f} us {rate}")
        return took

    def random(self, *shape: int) -> Tensor:
        return torch.randn(shape).to(self.dtype)


def limit(dtype: torch.dtype) -> float:
    """Bytes/s at which a one-row product with unchunked prepacked weights reads them, cold in cache."""
    packed = [onednn.pack(torch.randn(8192, 1024).to(dtype)) for _ in range(N_SETS * 4)]
    x = torch.randn(1, 1024).to(dtype)
    n_bytes = 4 * 8192 * 1024 * dtype.itemsize
    best = seconds(lambda one: [onednn.linear(x, each) for each in packed[one * 4 : one * 4 + 4]], share=0)
    return n_bytes / best


def linears(table: Table) -> None:
    """The selected product against oneDNN, whose chunks make it indifferent to width, and what the chunks cost."""
    say("\nlinear; beside it oneDNN prepacked in chunks of 1024 inputs, in one piece, and F.linear")
    for n_out, n_in in (
        (256, 256),
        (768, 256),
        (1408, 256),
        (4096, 1024),
        (1024, 2048),
        (1024, 3072),
        (8192, 2048),
    ):
        weights = [table.random(n_out, n_in) / n_in**0.5 for _ in range(N_SETS)]
        packed = [pack(weight) for weight in weights]
        chunked = [onednn.pack(weight) for weight in weights]
        reorder = torch.ops.mkldnn._reorder_linear_weight.default
        whole = [onednn.ChunkedWeight((reorder(weight),), None, n_in, n_out) for weight in weights]
        n_bytes = n_out * n_in * table.dtype.itemsize
        for n_rows in (1, 4, 9, 17, 128):
            x, name = table.random(n_rows, n_in), f"linear {n_out}x{n_in}, {n_rows} rows"
            mine = table.line(name, lambda one, x=x, packed=packed: linear(x, packed[one]), n_bytes)
            others = (
                seconds(lambda one, x=x, packed=chunked: onednn.linear(x, packed[one])),
                seconds(lambda one, x=x, packed=whole: onednn.linear(x, packed[one])),
                seconds(lambda one, x=x, weights=weights: F.linear(x, weights[one])),
            )
            shares = "  ".join(f"{1e6 * other:.1f} us ({other / mine:.2f} x)" for other in others)
            say(f"    chunks, one piece, F.linear: {shares}")


def head(table: Table) -> None:
    say("\nvocabulary head")
    packed = pack(table.random(VOCAB, 1024))
    for n_rows in (1, 9, 17):
        x = table.random(n_rows, 1024)
        table.line(
            f"linear {VOCAB}x1024, {n_rows} rows",
            lambda _, x=x: linear(x, packed),
            VOCAB * 1024 * table.dtype.itemsize,
        )


def make_batch(n_rows: int, n_past: int) -> Batch:
    n_pages = -(-(n_past + n_rows) // PAGE)
    pages = torch.randperm(n_pages).tolist()
    return Batch.build([Span(0, [0] * n_rows, n_past, 0, 1)], [pages], PAGE, torch.device("cpu"))


def stores(table: Table, batch: Batch) -> Pairs:
    shape = (batch.page_table.shape[1], N_KV_HEADS, PAGE, D_HEAD)
    return [(table.random(*shape), table.random(*shape)) for _ in range(N_SETS)]


def attentions(table: Table) -> None:
    say("\nattention, one span, one layer: 16 query heads, 8 K/V heads, 128")
    for n_rows, n_past in (
        (1, 0),
        (1, 512),
        (1, 2048),
        (1, 8192),
        (9, 512),
        (17, 512),
        (17, 2048),
        (128, 0),
        (128, 512),
        (128, 2048),
    ):
        batch = make_batch(n_rows, n_past)
        kv, q = stores(table, batch), table.random(n_rows, N_HEADS, D_HEAD)
        n_bytes = 2 * (n_past + n_rows) * N_KV_HEADS * D_HEAD * table.dtype.itemsize
        took = table.line(
            f"attention, {n_rows} rows after {n_past}",
            lambda one, q=q, kv=kv, batch=batch: attention(q, *kv[one], batch, 0.1),
            n_bytes,
        )
        n_products = 2 * N_HEADS * D_HEAD * sum(range(n_past + 1, n_past + n_rows + 1))
        say(f"    {2 * n_products / took / 1e9:.0f} GFLOP/s")


def rows(table: Table) -> None:
    say("\nrow ops, one layer")
    d = D_HEAD
    norms = HeadNorms(table.random(d), table.random(d), 1e-6)
    rope = Rope(torch.rand(4096, d // 2), torch.rand(4096, d // 2))
    for n_rows in (1, 9, 17, 128):
        batch = make_batch(n_rows, 300)
        x, weight = table.random(n_rows, 1024), table.random(1024)
        qkv, kv = table.random(n_rows, (N_HEADS + 2 * N_KV_HEADS) * d), stores(table, batch)
        gate_up = table.random(n_rows, 6144)
        table.line(f"add_rms_norm, {n_rows} rows", lambda _, x=x, w=weight: add_rms_norm(x, x, w, 1e-6))

        def write(one: int, qkv: Tensor = qkv, kv: Pairs = kv, batch: Batch = batch) -> Tensor:
            return norm_rope_write(qkv, norms, rope, batch, *kv[one])

        table.line(f"norm_rope_write, {n_rows} rows", write)
        table.line(f"gated_mul 2x3072, {n_rows} rows", lambda _, x=gate_up: gated_mul(x, SILU))


def mixtures(table: Table) -> None:
    """Bytes are those of the experts that some row asks for; each set asks for others."""
    n_experts, d_model, d_inner, top_k = 32, 2048, 768, 8
    say(f"\nmixture of experts, one layer: {n_experts} of {d_model} -> 2 x {d_inner}, {top_k} a row")
    packed = pack_experts(
        table.random(n_experts, 2 * d_inner, d_model) / d_model**0.5,
        table.random(n_experts, d_model, d_inner) / d_inner**0.5,
    )
    routing = Routing(top_k=top_k, scores="softmax", normed=True)
    for n_rows in (1, 2, 4, 9, 17, 128):
        x, logits = table.random(n_rows, d_model), [table.random(n_rows, n_experts) for _ in range(N_SETS)]
        table.line(f"route, {n_rows} rows", lambda one, logits=logits: route(logits[one], routing))
        routed = [route(one, routing) for one in logits]
        n_touched = sum(len(set(one.expert_ids.flatten().tolist())) for one in routed) / N_SETS
        n_bytes = n_touched * 3 * d_model * d_inner * table.dtype.itemsize
        name = f"experts, {n_rows} rows, {n_touched:.0f} touched"
        table.line(name, lambda one, x=x, routed=routed: experts(x, routed[one], packed), n_bytes)


def picks() -> None:
    settings = {
        "T 0": (0.0, 0, 1.0),
        "T 0.8": (0.8, 0, 1.0),
        "T 0.8, top_p 0.95": (0.8, 0, 0.95),
        "T 0.8, top_k 50": (0.8, 50, 1.0),
    }
    say("\nchoose, float32 logits of standard deviation 3")
    for n_rows, vocab in ((1, 4096), (1, VOCAB), (9, VOCAB), (17, VOCAB)):
        logits = torch.randn(n_rows, vocab) * 3
        for name, (temperature, top_k, top_p) in settings.items():
            params = RowParams(
                torch.full((n_rows,), temperature),
                torch.full((n_rows,), top_k, dtype=torch.int32),
                torch.full((n_rows,), top_p),
                torch.zeros(n_rows),
                torch.arange(n_rows),
                torch.arange(n_rows),
            )
            took = seconds(lambda _, logits=logits, params=params: choose(logits, params))
            label = f"choose, {n_rows} rows of {vocab}, {name}"
            say(f"{label:44} {1e6 * took:9.1f} us {1e6 * took / n_rows:9.1f} a row")
            if temperature == 0.0:
                continue
            edits, masks = changes(n_rows, vocab)
            for says, given in (("64 entries a row", (edits,)), ("a mask a row", (None, masks))):
                took = seconds(lambda _, x=logits, p=params, given=given: choose(x, p, *given))
                say(f"{f'{label}, {says}':60} {1e6 * took / n_rows:9.1f} a row")


def changes(n_rows: int, vocab: int, n_entries: int = 64) -> tuple[Edits, Masks]:
    """Penalties of the window's tokens, and masks that allow every other word of 32 tokens."""
    n = n_rows * n_entries
    edits = Edits(
        torch.arange(n_rows + 1, dtype=torch.int32) * n_entries,
        torch.arange(n, dtype=torch.int32) % vocab,
        torch.zeros(n),
        torch.full((n,), 1.1),
        torch.zeros(n),
    )
    allowed = (torch.arange(-(-vocab // 32), dtype=torch.int32) % 2 - 1).repeat(n_rows, 1)
    return edits, Masks(torch.arange(n_rows, dtype=torch.int32), allowed)


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    dtype = getattr(torch, options.dtype)
    for device in ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",):
        say(f"on {device}:")
        for line in kernels.select(device, dtype):
            say(f"    {line.op}: {line.implementation} ({line.reason})")
    with torch.inference_mode():
        table = Table(limit(dtype), dtype)
        say(f"{options.threads} threads, {options.dtype}; oneDNN reads {table.limit / 1e9:.1f} GB/s")
        for part in (linears, head, attentions, rows, mixtures):
            part(table)
        for n_value_heads, per_key in ((16, False), (32, False), (16, True)):
            say(
                f"\nrecurrent ops, one layer: {n_value_heads} value heads{', a decay per key' if per_key else ''}"
            )
            recurrent(table.line, table.random, N_SETS, n_value_heads, per_key=per_key)
        picks()


if __name__ == "__main__":
    main(sys.argv[1:])
