"""The demo's DSpark head: what the engine reads of it is what was trained, and it is worth its passes.

The repository holds it in two halves (`demo.assemble_dspark`). The network it was trained as, in `demo.heads`, is the
oracle for the one that the engine loads from the assembled folder.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from demo import assemble_dspark, head_files, heldout
from demo import checkpoint as trained
from demo.drafting import BlockDrafter
from demo.heads import DSparkHead, streams
from slipstream.engine.api import Sampling, Speculate
from slipstream.engine.batch import Span
from slipstream.engine.errors import LoadError
from slipstream.engine.models.heads.dspark import DSpark, load_dspark
from slipstream.engine.speculate.registry import kind_of
from tests.oracle.head_rounds import N_CTX, Pages, block_at, streams_of
from tests.oracle.lab import DEMO, Bench, Case, Lab, play
from tests.oracle.lossless import demo_prompt

ABOUT = ("engine/speculate/network/*.py",)

pytestmark = pytest.mark.usefixtures("_selected")
KINDS = ("rename", "continue", "docstring")


@pytest.fixture(scope="module")
def lab(_selected: None) -> Lab:
    return Lab(DEMO, torch.float32)


@pytest.fixture(scope="module")
def head(lab: Lab) -> DSpark:
    found = lab.head("draft-dspark")
    assert isinstance(found, DSpark)
    return found


def test_the_assembled_folder_is_an_ordinary_one(lab: Lab, head: DSpark, tmp_path: Path) -> None:
    assert kind_of(assemble_dspark.assemble(tmp_path)) == "draft-dspark"
    assert (head.taps, head.block_size, head.n_drafts, head.mask_id) == ((1, 2, 3, 4), 8, 7, 0)
    assert head.confidence_head is not None
    with pytest.raises(LoadError, match=r"dspark.*fc\.weight"):  # a half by itself
        load_dspark(assemble_dspark.FOLDER / "dspark", lab.target, N_CTX)


@torch.inference_mode()
def test_the_engine_drafts_what_the_trained_network_does(lab: Lab, head: DSpark) -> None:
    """Picks after several anchors of a text, and how sure the head is of them."""
    theirs = head_files.load(assemble_dspark.FOLDER / "dspark")
    assert isinstance(theirs, DSparkHead)
    network = trained.load(DEMO.target)
    ids = lab.tokenizer.encode(Path(__file__).read_text())[:N_CTX]
    states = head_files.states(theirs, streams(network, torch.tensor([ids]), torch.float32))[0]  # [n, width]
    context = streams_of(lab.target, ids, head.taps)
    for anchor in (20, 47, 81, 110):
        drafter, pages = BlockDrafter(theirs, network), Pages(head.needs)
        drafter.observe(states[:anchor], ids[1 : anchor + 1])
        expected = drafter.draft(head.n_drafts)
        head.inject(
            pages.batch(Span(0, ids[:anchor], 0, 0, 0)), [row[:anchor] for row in context], pages.store
        )
        logits, hidden = head.run(pages.batch(block_at(head, 0, ids, anchor, head.n_drafts)), pages.store)
        picked = [ids[anchor]]
        for row in logits:
            picked.append(int(head.correct(row[None], torch.tensor([picked[-1]])).argmax()))
        assert picked[1:] == expected
        before = torch.tensor(picked[:-1])  # [n_drafts]
        sure = head.confidence(hidden, before)
        assert sure is not None
        torch.testing.assert_close(sure, theirs.confidence(hidden, before).sigmoid(), atol=1e-4, rtol=1e-3)


@pytest.mark.sampled
@pytest.mark.parametrize("kind", KINDS)
def test_tokens_a_pass(lab: Lab, kind: str) -> None:
    """At least one and a half through the engine, and more than with the DFlash that it was made from."""
    asked = [one.task.prompt_messages for one in heldout.load(kind, "short")[:6]]  # type: ignore[arg-type]
    sampling, speculate = Sampling(temperature=0.0, ignore_eos=False), Speculate(n_max=7)
    cases = [Case(demo_prompt(lab.tokenizer, one), sampling, speculate) for one in asked]
    lengths = []
    for drafter in ("draft-dflash", "draft-dspark"):
        played = play(lab, Bench((drafter,), adaptive=False), cases)
        n_steps = sum(one.speculation.n_steps for one in played.done.values())
        lengths.append(sum(map(len, played.tokens.values())) / n_steps)
    flash, spark = lengths
    assert spark >= 1.5
    assert spark > flash
