"""The losslessness suite: the same tokens as plain decoding, over drafters, sampling, slots and disturbances.

    python -m tests.oracle.lossless [--cache full window hybrid] [--dtype float32] [--rounds 3] [--drafter suffix]
    python -m tests.oracle.lossless --target FILE.gguf --draft FILE.gguf

runs it whole, over networks with each kind of cache or over files, and prints a table; `test_lossless.py` runs a sample
of it.
"""

from __future__ import annotations

import argparse
import itertools
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path

import numpy as np
import torch

from slipstream.engine.api import Sampling, Speculate
from slipstream.engine.constraints import Grammar, ThinkingBudget
from slipstream.engine.speculate.registry import DRAFTERS
from slipstream.engine.text.tokenizer import Tokenizer
from slipstream.kernels.matmul.quantized import round_inputs
from tests.oracle.lab import (
    ASKS,
    DEMO,
    HEADS,
    ROOT,
    Bench,
    Case,
    Folders,
    Lab,
    Played,
    Trouble,
    differences,
    play,
)
from tests.oracle.ranks_lab import RanksLab

SAMPLINGS: Mapping[str, Sampling] = {
    "greedy": Sampling(temperature=0.0, top_p=1.0, top_k=0),
    "warm": Sampling(temperature=0.8, top_p=1.0, top_k=0),
    "all": Sampling(
        temperature=1.0,
        top_p=0.92,
        min_p=0.02,
        repeat_penalty=1.3,
        repeat_last_n=40,
        presence_penalty=0.8,
        frequency_penalty=0.4,
        logit_bias=((20, 1.5), (30, -2.0)),
        bad_words=("self.", "in range("),
    ),
    "ruled": Sampling(temperature=0.9, top_p=0.98, frequency_penalty=0.2),
}
_PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "kind": {"enum": ["animal", "vegetable", "mineral"]},
        "sizes": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99}, "maxItems": 5},
        "parent": {"anyOf": [{"type": "null"}, {"type": "boolean"}]},
    },
    "required": ["name", "kind", "sizes", "parent"],
    "additionalProperties": False,
}
# What the cases of "ruled" ask for: grammars, log-probabilities, the prompt's too, other ways to end.
RULED = (
    replace(ASKS, grammar=Grammar("json_schema", json.dumps(_PERSON)), logprobs=2),
    # Every reply begins with an opener of no characters, and so thinks.
    replace(ASKS, thinking_budget=ThinkingBudget(7, ("", "# end\n"), "\n# so much for ")),
    replace(
        ASKS,
        thinking_budget=ThinkingBudget(5, ("", "```")),
        grammar=Grammar("lark", 'start: ("yes" | "no, because " /[a-z ]{10,60}/) "."', ("", "```")),
    ),
    replace(
        ASKS, grammar=Grammar("regex", "(def|class) [a-z]{3,12}\\(self(, [a-z]{2,6}){0,3}\\):"), min_tokens=9
    ),
    replace(ASKS, echo=True, prompt_logprobs=1, logprobs=1, min_tokens=20, stop_token_ids=(300, 301)),
    replace(ASKS, grammar=Grammar("lark", 'start: ("yes" | "no, because " /[a-z ]{10,60}/) "."'), echo=True),
    replace(ASKS, grammar=Grammar("json_schema", '{"type": "object"}'), logprobs=0),
)
TROUBLE = Trouble(cancel_share=0.4, save_share=0.05)
TEXT_DRAFTERS = tuple(
    row.name for row in DRAFTERS if row.network is None and row.brought_by is None and row.is_offered
)
AUTO = ("forced", "prediction", "suffix", "draft-model")
ASSISTANT = "draft-assistant"  # its target is no demo model
ALL = ("forced", "prediction", *TEXT_DRAFTERS, "draft-model", *HEADS, ASSISTANT, "garbage", "scripted")
HYBRID = Folders(
    ROOT / "demo" / "hybrid", ROOT / "demo" / "hybrid-draft", {"draft-mtp": ROOT / "demo" / "hybrid"}
)
KINDS = ("full", "window", "hybrid", "latent", "latent-hybrid", "shared", "narrow-values")
# Networks of other families have random weights; their draft model is the network itself with noise.
RANDOM = {
    "latent": "deepseek_v3",
    "latent-hybrid": "kimi_linear",
    "shared": "gemma4",
    "narrow-values": "mimo_v2_flash",  # in windows with sinks
    "many-heads": "qwen3_5",  # a hybrid that can be divided, as the demo's cannot
}
WINDOW = 128  # tokens; less than most prompts of the suite
# What requests ask for themselves; `types` is drawn from the chain.
OVERRIDES: Sequence[Speculate] = (
    Speculate(),
    Speculate(n_max=1),
    Speculate(n_max=16, n_min=3),
    Speculate(n_max=3, p_min=0.6),
    Speculate(n_max=24, ngram_size_n=2, ngram_size_m=5, ngram_min_hits=2),
    Speculate(n_max=8, ngram_size_n=1),
    Speculate(n_max=64),
    Speculate(n_max=0),
)


def folders_of(kind: str, scratch: Path) -> Folders:
    """Networks with one kind of cache: the demo's, for windows told to look back less far, or random ones."""
    if kind in RANDOM:
        return _random(RANDOM[kind], scratch)
    if kind == "window":
        return Folders(*(_windowed(folder, scratch) for folder in (DEMO.target, DEMO.draft)))
    return HYBRID if kind == "hybrid" else DEMO


def _random(family: str, scratch: Path) -> Folders:
    # Here because machines that test a GPU have no transformers.
    from tests.assistant_checkpoint import assistant_checkpoint
    from tests.checkpoints import deepseek_head, edited, noised_copy, theirs, tiny_checkpoint
    from tests.oracle.window_heads import with_window_head

    target = tiny_checkpoint(family, scratch / "plain", changes={"max_position_embeddings": 1024})
    draft = noised_copy(target, scratch / "draft", 0.02)
    if family == "gemma4":
        return Folders(target, draft, {ASSISTANT: assistant_checkpoint(target, scratch / "assistant")})
    if family == "mimo_v2_flash":
        with_head = with_window_head("mimo", target, scratch / "target")
        return Folders(with_head, draft, {"draft-mtp": with_head})
    if family != "deepseek_v3":
        return Folders(target, draft)
    _, head = deepseek_head(theirs(target))
    with_head = edited(target, scratch / "target", lambda tensors: tensors.update(head))
    return Folders(with_head, draft, {"draft-mtp": with_head})


def _windowed(folder: Path, scratch: Path) -> Path:
    """A copy of a checkpoint of which every second layer sees a window only; its text is poorer for it."""
    copy = scratch / folder.name
    shutil.copytree(folder, copy, dirs_exist_ok=True)
    config = json.loads((copy / "config.json").read_text())
    kinds = [("sliding_attention", "full_attention")[i % 2] for i in range(config["num_hidden_layers"])]
    told = {"use_sliding_window": True, "sliding_window": WINDOW, "layer_types": kinds}
    (copy / "config.json").write_text(json.dumps({**config, **told}))
    return copy


def drafters(folders: Folders) -> tuple[str, ...]:
    """All that the folders have a network for."""
    return tuple(name for name in ALL if name not in (*HEADS, ASSISTANT) or name in folders.heads)


def chains(folders: Folders) -> list[tuple[str, ...]]:
    """Nothing, every drafter alone, the default, and all at once."""
    known = drafters(folders)
    return [(), *((name,) for name in known), AUTO, known]


def demo_prompt(tokenizer: Tokenizer, messages: Sequence[Mapping[str, str]]) -> tuple[int, ...]:
    """What the demo's chat template makes of messages without tools, for machines that have no jinja2."""
    text = "".join(f"<|im_start|>{one['role']}\n{one['content']}<|im_end|>\n" for one in messages)
    return tuple(tokenizer.encode(f"{text}<|im_start|>assistant\n"))


def demo_cases(lab: Lab, name: str, n_cases: int, seed: int = 0) -> list[Case]:
    """Demo tasks as requests: half of them share another one's prompt with another seed, a third of those edited."""
    with (ROOT / "demo" / "tasks.jsonl").open() as file:
        tasks = [json.loads(line) for line in file]
    tasks = tasks[seed % 7 :: 7]
    cases = []
    for i in range(n_cases):
        prompt = demo_prompt(lab.tokenizer, tasks[i // 2 % len(tasks)]["messages"])[:300]
        if i % 6 == 5:  # an earlier part of the conversation was taken out
            prompt = prompt[: len(prompt) // 3] + prompt[len(prompt) // 2 :]
        base = SAMPLINGS[name]
        sampling = replace(base, seed=1000 * seed + i, ignore_eos=i % 3 > 0)
        speculate = OVERRIDES[(seed + i) % len(OVERRIDES)]
        asks = RULED[i % len(RULED)] if name == "ruled" else ASKS
        cases.append(Case(prompt, sampling, speculate, 40 + 8 * (i % 3), (None, 0, 4)[i % 3], asks))
    return cases


def narrowed(cases: Sequence[Case], chain: tuple[str, ...], seed: int) -> list[Case]:
    """The cases, a third of them using only some of the chain; sizes are asked only of drafters that have them."""
    random = np.random.default_rng(seed)
    told = []
    for i, case in enumerate(cases):
        types = tuple(name for name in chain if random.random() < 0.5) if i % 3 == 2 else None
        speculate = replace(case.speculate, types=types)
        if not {"ngram-simple", "ngram-map-k", "ngram-map-k4v"} & set(chain if types is None else types):
            speculate = replace(speculate, ngram_size_n=None, ngram_size_m=None, ngram_min_hits=None)
        told.append(replace(case, speculate=speculate))
    return told


def benches(chain: tuple[str, ...]) -> Iterator[Bench]:
    """One slot; four with few pages, so that slots are preempted; eight with few rows; drafts of 64 tokens; passes that
    are launched ahead; replays, ahead too. Replays in exact frames. Contexts of networks that are shorter than prompts,
    and longer.
    """
    yield Bench(chain, n_slots=1, batch_size=32, adaptive=False, shares=True, recorded=True)
    yield Bench(chain, n_slots=4, n_pages=26, overlaps=True)
    yield Bench(
        chain,
        n_slots=8,
        n_pages=512,
        batch_size=48,
        page_size=8,
        adaptive=False,
        by_value=False,
        recorded=True,
    )
    yield Bench(chain, n_slots=3, batch_size=96, adaptive=False, draft_max=64, n_parked=150)
    yield Bench(chain, n_slots=3, page_size=8, adaptive=False, draft_max=12, overlaps=True, draft_context=50)
    yield Bench(chain, n_slots=3, n_pages=40, draft_max=12, captured=True, overlaps=True, draft_context=33)


@dataclass(slots=True)
class Tally:
    """What was compared, and what disturbed it."""

    n_tokens: int = 0
    n_wrong: int = 0  # requests that differ
    n_accepted: int = 0  # drafts
    n_preempted: int = 0
    n_cached: int = 0  # prompt tokens from the prefix cache
    n_restored: int = 0  # tokens of slots that were saved, erased and restored

    def add(self, other: Tally) -> None:
        for one in fields(self):
            setattr(self, one.name, getattr(self, one.name) + getattr(other, one.name))


def compare(
    lab: Lab, name: str, n_cases: int, seed: int, drafter: str | None = None
) -> Iterator[tuple[Bench, Tally]]:
    """Every chain on every bench, or those that a drafter is in."""
    cases = demo_cases(lab, name, n_cases, seed)
    expected = play(lab, Bench(), cases, seed=seed)
    asked = [chain for chain in chains(lab.folders) if drafter is None or drafter in chain]
    for i, bench in enumerate(bench for chain in asked for bench in benches(chain)):
        # By the machine's own clock: lengths are those that really come.
        bench = replace(bench, now=time.perf_counter)
        yield bench, disturbed(lab, bench, cases, expected, 100 * seed + i)


def disturbed(lab: Lab, bench: Bench, cases: Sequence[Case], expected: Played, seed: int) -> Tally:
    """One engine under random arrivals, cancels and overrides against the expected tokens."""
    asked = narrowed(cases, bench.types, seed)
    played = play(lab, bench, asked, seed=seed + 1, trouble=TROUBLE, known=expected.tokens)
    assert not played.failed, {i: (one.error, one.error.__cause__) for i, one in played.failed.items()}
    assert set(played.tokens) == set(expected.tokens)
    assert played.stats is not None
    assert played.stats.n_pages_held == 0
    assert not played.stats.disabled_drafters
    n_tokens, n_wrong = differences(played, expected)
    n_accepted = sum(one.n_accepted for one in played.stats.drafters.values())
    return Tally(
        n_tokens,
        n_wrong,
        n_accepted,
        played.stats.n_preempted,
        played.n_cached,
        played.n_restored,
    )


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cache", nargs="*", default=KINDS, choices=(*KINDS, "many-heads"))
    parser.add_argument("--dtype", nargs="*", default=["float32", "bfloat16"])
    parser.add_argument("--cases", type=int, default=16)
    parser.add_argument(
        "--target", type=Path, help="the suite's networks are not run, but this, as a GGUF file"
    )
    parser.add_argument("--draft", type=Path, help="a draft model for it")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--ranks", type=int, default=1, help="over which the target is divided, as threads")
    parser.add_argument("--drafter", choices=ALL, help="only the chains that this one is in")
    parser.add_argument(
        "--round-activations", action="store_true", help="as the server's setting, of a --target"
    )
    options = parser.parse_args(arguments)
    round_inputs(options.round_activations)
    started = time.perf_counter()
    total = Tally()
    for kind in ["files"] if options.target is not None else options.cache:
        of_kind = Tally()
        for chain, tally in _of_kind(kind, options).items():
            of_kind.add(tally)
            sys.stdout.write(f"{line(tally)}  {kind}: {chain}\n")
        sys.stdout.write(f"{line(of_kind)}  {kind}, {time.perf_counter() - started:.0f} s\n")
        sys.stdout.flush()
        total.add(of_kind)
    sys.stdout.write(f"{line(total)}  total\n")
    return 1 if total.n_wrong else 0


def _of_kind(kind: str, options: argparse.Namespace) -> dict[str, Tally]:
    """What was found with one kind of cache, by chain."""
    by_chain: dict[str, Tally] = {}
    with tempfile.TemporaryDirectory() as scratch:
        if options.target is not None:
            folders = Folders(options.target, options.draft)
        else:
            folders = folders_of(kind, Path(scratch))
        for dtype, name, seed in itertools.product(options.dtype, SAMPLINGS, range(options.rounds)):
            lab = lab_of(folders, getattr(torch, dtype), options.ranks)
            for bench, found in compare(lab, name, options.cases, seed, options.drafter):
                by_chain.setdefault("+".join(bench.types) or "plain", Tally()).add(found)
    return by_chain


def lab_of(folders: Folders, dtype: torch.dtype, n_ranks: int) -> Lab:
    """The bench of these networks, the target divided over so many ranks."""
    return Lab(folders, dtype) if n_ranks == 1 else RanksLab(folders, dtype, n_ranks)


def line(tally: Tally) -> str:
    """A tally in words."""
    return (
        f"{tally.n_tokens:8} tokens, {tally.n_wrong} requests differ, {tally.n_accepted} drafts accepted,"
        f" {tally.n_preempted} preempted, {tally.n_cached} prompt tokens from the cache,"
        f" {tally.n_restored} restored"
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
