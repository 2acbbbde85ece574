"""What requests ask for besides text, on the demo model: log-probabilities, the prompt's too, other ways to end."""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer as HFTokenizer
from tokenizers import decoders
from tokenizers.models import BPE
from torch import Tensor
from transformers import AutoModelForCausalLM

from slipstream.engine.api import Delta, Done, Failed, Request, Sampling, Speculate
from slipstream.engine.constraints import Grammar
from slipstream.engine.errors import InvalidRequest, Overloaded, TimedOut, Unsupported
from slipstream.engine.sample.logprobs import Judged
from slipstream.engine.text.tokenizer import Tokenizer
from tests.oracle.lab import ASKS, DEMO, Bench, Case, Folders, Lab, play
from tests.oracle.lossless import HYBRID

GREEDY = Sampling(temperature=0.0, top_p=1.0, top_k=0, ignore_eos=True)
TEXT = "def area(width, height):\n    return width * height\n\n\ndef volume(width, height, depth):\n"


@pytest.fixture(scope="module")
def lab() -> Lab:
    return Lab(DEMO, torch.float32)


def case(lab: Lab, asks: Request, sampling: Sampling = GREEDY, max_tokens: int = 24) -> Case:
    return Case(tuple(lab.tokenizer.encode(TEXT)), sampling, Speculate(n_max=8), max_tokens, asks=asks)


@pytest.fixture(scope="module")
def theirs(lab: Lab) -> torch.Tensor:
    """transformers' log-probabilities of prompt and greedy reply: [n_tokens, vocab]."""
    reply = play(lab, Bench(), [case(lab, ASKS)]).tokens[0]
    ids = [*lab.tokenizer.encode(TEXT), *reply]
    model = AutoModelForCausalLM.from_pretrained(DEMO.target, dtype=torch.float32)
    with torch.inference_mode():
        return model(torch.tensor([ids])).logits[0].log_softmax(-1)


def test_logprobs_are_those_of_the_raw_rows(lab: Lab, theirs: torch.Tensor) -> None:
    """Bias, penalties and temperature change what is picked, not what is told."""
    n_prompt = len(lab.tokenizer.encode(TEXT))
    asks = replace(ASKS, logprobs=3)
    plain = play(lab, Bench(("scripted",)), [case(lab, asks)])
    for i, one in enumerate(plain.logprobs[0]):
        row = theirs[n_prompt - 1 + i]
        assert one.token_id == plain.tokens[0][i]
        assert one.logprob == pytest.approx(row[one.token_id].item(), abs=1e-3)
        assert [top.logprob for top in one.top] == pytest.approx(row.topk(3).values.tolist(), abs=1e-3)
        assert one.top[0].token_id == one.token_id, "greedy"
        assert one.data == lab.tokenizer.token_bytes(one.token_id)
    banned = plain.tokens[0][0]
    edited = replace(GREEDY, logit_bias=((banned, -100.0),), temperature=0.7, seed=1)
    other = play(lab, Bench(), [case(lab, asks, edited)])
    assert other.tokens[0][0] != banned
    first = other.logprobs[0][0]
    assert first.top == plain.logprobs[0][0].top
    assert first.logprob == pytest.approx(theirs[n_prompt - 1][first.token_id].item(), abs=1e-3)


def test_an_echo_tells_what_the_model_says_of_the_prompt(lab: Lab, theirs: torch.Tensor) -> None:
    ids = lab.tokenizer.encode(TEXT)
    for bench in (Bench(), Bench(batch_size=16), Bench(("draft-model",), n_slots=3)):
        # A second request for the same prompt must not be spared any of its rows.
        played = play(lab, bench, [case(lab, replace(ASKS, prompt_logprobs=1, logprobs=3))] * 3)
        echo = played.echoes[0]
        assert list(played.echoes.values()) == [echo] * 3
        assert list(echo.token_ids) == ids
        assert "".join(echo.pieces) == TEXT
        assert len(echo.logprobs) == len(ids)
        assert echo.logprobs[0] is None
        for i, one in enumerate(echo.logprobs[1:]):
            assert one is not None
            assert one.token_id == ids[i + 1]
            assert one.logprob == pytest.approx(theirs[i][one.token_id].item(), abs=1e-3)
            near = (theirs[i] - theirs[i][one.token_id]).abs() < 1e-3  # may change places
            assert one.rank == pytest.approx(
                int((theirs[i] >= theirs[i][one.token_id]).sum()), abs=int(near.sum())
            )
            assert len(one.top) == 1
            assert one.top[0].logprob == pytest.approx(theirs[i].max().item(), abs=1e-3)
        assert played.n_cached == 0


def test_an_echo_without_logprobs_costs_no_rows(lab: Lab) -> None:
    played = play(lab, Bench(n_slots=2), [case(lab, replace(ASKS, echo=True))] * 2)
    assert all(one.logprobs == () and "".join(one.pieces) == TEXT for one in played.echoes.values())
    again = play(lab, Bench(), [case(lab, replace(ASKS, echo=True))] * 2)
    assert again.n_cached > 0


def test_logprobs_are_finite_and_ties_fall_to_the_lower_id() -> None:
    rows = torch.tensor([[0.0, 5.0, 5.0, -math.inf]])
    (one,) = Judged(rows, torch.tensor([3]), 3).read([3])
    assert one.logprob == -9999.0
    assert [token_id for token_id, _ in one.top] == [1, 2, 0]
    assert Judged(rows, torch.tensor([3]), 3).read([]) == []
    assert one.rank is None
    assert [Judged(rows, torch.tensor([i]), 0, ranked=True).read([i])[0].rank for i in range(4)] == [
        3,
        2,
        2,
        4,
    ]
    assert Judged(rows, torch.tensor([1]), 0).read([1])[0].top == []


def test_nothing_ends_a_reply_before_its_least_length(lab: Lab) -> None:
    free = play(lab, Bench(), [case(lab, ASKS)]).tokens[0]
    stop = free[3]
    for bench in (Bench(), Bench(("scripted",), adaptive=False)):
        early = replace(ASKS, stop_token_ids=(stop,))
        ended = play(lab, bench, [case(lab, early)], known={0: free})
        assert ended.tokens[0] == free[: free.index(stop) + 1]
        assert (ended.done[0].reason, ended.done[0].stop_token) == ("stop", stop)
        assert ended.done[0].stop_string is None
        late = play(lab, bench, [case(lab, replace(early, min_tokens=12))], known={0: free})
        assert len(late.tokens[0]) > 12
        assert stop not in late.tokens[0][:12]


def test_a_stop_string_before_the_least_length_is_text(lab: Lab) -> None:
    free = play(lab, Bench(), [case(lab, ASKS)]).tokens[0]
    word = lab.tokenizer.decode(free[2:3])
    assert word
    asks = replace(ASKS, stop=(word,))
    ended = play(lab, Bench(("scripted",)), [case(lab, asks)], known={0: free})
    assert ended.done[0].stop_string == word
    assert len(ended.tokens[0]) <= 3
    late = play(lab, Bench(("scripted",)), [case(lab, replace(asks, min_tokens=20))], known={0: free})
    assert len(late.tokens[0]) >= 20
    assert late.tokens[0][:20] == free[:20]


@pytest.mark.parametrize("types", [(), ("scripted",)], ids=["plain", "drafts"])
def test_what_ends_a_reply_is_part_of_it_on_request(lab: Lab, types: tuple[str, ...]) -> None:
    """A stop string, and a stop token or end token as far as control tokens are shown."""
    free = play(lab, Bench(), [case(lab, ASKS)]).tokens[0]
    text = lab.tokenizer.decode(free)
    word, end = text[3:9], next(iter(lab.tokenizer.eos_ids))
    at_once = replace(GREEDY, ignore_eos=False, logit_bias=((end, 100.0),))
    token = replace(ASKS, stop_token_ids=(free[5],))
    for asks, sampling, told in (
        (replace(ASKS, stop=(word,)), GREEDY, text[: text.index(word) + len(word)]),
        (token, GREEDY, lab.tokenizer.decode(free[: free.index(free[5]) + 1])),
        (replace(token, logprobs=0), GREEDY, lab.tokenizer.decode(free[: free.index(free[5]) + 1])),
        (ASKS, at_once, ""),
        (replace(ASKS, skip_special=False), at_once, lab.tokenizer.token(end)),
    ):
        bench = Bench(types, adaptive=False)
        engine = lab.engine(bench, lambda slot: free[slot.n_decoded :])
        engine.add(lab.slot("a", case(lab, replace(asks, include_stop=True), sampling), bench))
        events = []
        while engine.busy:
            events += [event for _, event in engine.step()]
        assert isinstance(events[-1], Done)
        assert events[-1].reason == "stop"
        deltas = [one for one in events if isinstance(one, Delta)]
        assert "".join(one.text for one in deltas) == told
        if asks.logprobs is not None:
            assert [one.token_id for delta in deltas for one in delta.logprobs] == free[
                : free.index(free[5]) + 1
            ]


def test_tokens_that_are_ruled_out_never_come(lab: Lab) -> None:
    """Bad words of one token and of several, tokens that are not allowed: with drafts the same as without."""
    free = play(lab, Bench(), [case(lab, ASKS)]).tokens[0]
    words = (lab.tokenizer.decode(free[at : at + n]) for n in (1, 3) for at in range(2, 12))
    ids = {one: tuple(lab.tokenizer.encode(one, add_special=False)) for one in words}
    alone, several = (next(one for one in ids if len(ids[one]) == n and one == one.lstrip()) for n in (1, 3))
    cases = [
        case(lab, ASKS, replace(GREEDY, bad_words=(alone,))),
        case(lab, ASKS, replace(GREEDY, bad_words=(several,))),
        case(lab, ASKS, replace(GREEDY, bad_words=(alone, several), temperature=0.9, seed=3)),
        case(lab, ASKS, replace(GREEDY, allowed_token_ids=free[:9])),
        case(
            lab, replace(ASKS, grammar=Grammar("regex", "[a-z]{9}")), replace(GREEDY, bad_words=("a", "re"))
        ),
    ]
    plain = play(lab, Bench(n_slots=2), cases)
    assert not plain.failed
    assert ids[alone][0] not in {*plain.tokens[0], *plain.tokens[2]}
    for i in (1, 2):
        reply = tuple(plain.tokens[i])
        assert ids[several] not in {reply[at : at + 3] for at in range(len(reply))}
    assert plain.tokens[1][: free.index(ids[several][0])] == free[: free.index(ids[several][0])]
    assert set(plain.tokens[3]) <= set(free[:9])
    known = dict.fromkeys(range(len(cases)), free)
    for bench in (
        Bench(("scripted",), adaptive=False),
        Bench(("draft-model", "suffix"), n_slots=3, adaptive=False, overlaps=True, recorded=True),
    ):
        drafted = play(lab, bench, cases, known=known)
        assert drafted.tokens == plain.tokens
        assert sum(one.speculation.n_accepted for one in drafted.done.values())


def test_a_reply_ends_where_its_grammar_does(lab: Lab) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 9}}}
    schema |= {"required": ["a"], "additionalProperties": False}
    asks = replace(ASKS, grammar=Grammar("json_schema", json.dumps(schema)))
    # Whatever a pass costs this machine just now.
    played = play(lab, Bench(("forced", "draft-model"), adaptive=False), [case(lab, asks)])
    made = json.loads(lab.tokenizer.decode(played.tokens[0]))
    assert set(made) == {"a"}
    done = played.done[0]
    assert done.reason == "stop"
    assert done.speculation.drafters["forced"].n_accepted == done.speculation.drafters["forced"].n_drafted > 0
    assert done.speculation.n_steps < done.usage.n_completion


def test_a_grammar_too_complex_to_follow_ends_its_request_alone(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    asks = replace(ASKS, grammar=Grammar("regex", "[a-z ]{200}"))
    cases = [case(lab, asks), case(lab, ASKS)]
    expected = play(lab, Bench(), cases[1:]).tokens[0]
    from slipstream.engine.text.grammar.constraint import Constraint

    honest = Constraint._mask

    def fails(self: Constraint) -> object:
        if len(self._tokens) < 7:
            return honest(self)
        self.failure = "too complex"
        words = honest(self)
        assert words is not None
        return words * 0

    monkeypatch.setattr(Constraint, "_mask", fails)
    played = play(lab, Bench(("scripted",), n_slots=2), cases, known={0: [], 1: expected})
    error = played.failed[0].error
    assert isinstance(error, InvalidRequest)
    assert str(error) == "response_format: cannot be followed any further: too complex"
    assert played.tokens[1] == expected


@pytest.mark.parametrize(
    ("banned", "param"),
    [
        ({"logit_bias": True}, "logit_bias"),
        ({"bad_words": True}, "bad_words"),
        ({"min_tokens": 2}, "min_tokens"),
        ({"allowed_token_ids": True}, "allowed_token_ids"),
    ],
)
def test_a_request_that_bans_what_its_grammar_forces_is_told_so(
    lab: Lab, banned: dict[str, int], param: str
) -> None:
    """It is no fault of the model: what is cached of its prompt stays good for others."""
    begins = tuple(lab.tokenizer.encode(text, add_special=False)[0] for text in ("y", "ye", "yes"))
    asks, sampling = replace(ASKS, grammar=Grammar("regex", "yes")), GREEDY
    if param == "logit_bias":
        sampling = replace(GREEDY, logit_bias=tuple((one, -math.inf) for one in begins))
    elif param == "bad_words":
        sampling = replace(GREEDY, bad_words=("y", "ye", "yes"))
    elif param == "allowed_token_ids":
        sampling = replace(GREEDY, allowed_token_ids=(300,))
    else:
        asks = replace(asks, min_tokens=banned["min_tokens"], stop_token_ids=begins)
    good = case(lab, ASKS)
    played = play(lab, Bench(n_slots=1), [good, case(lab, asks, sampling), good])
    error = played.failed[1].error
    assert isinstance(error, InvalidRequest)
    assert str(error) == f"{param}: bans every token that is allowed here"
    assert played.tokens[2] == played.tokens[0]
    assert played.done[2].usage.n_cached > 0


@pytest.mark.parametrize("folders", [DEMO, HYBRID], ids=["full", "hybrid"])
def test_a_reply_of_no_tokens_leaves_its_prompt_cached(folders: Folders) -> None:
    lab = Lab(folders, torch.float32)
    asked = [case(lab, ASKS, max_tokens=n) for n in (0, 1, 0)]
    played = play(lab, Bench(n_slots=1), asked)
    assert not played.failed
    assert [one.reason for one in played.done.values()] == ["length"] * 3
    assert [len(played.tokens.get(i, ())) for i in range(3)] == [0, 1, 0]
    assert played.done[2].usage.n_cached > 0


# --- time limits ---


def test_requests_that_wait_or_take_too_long_are_told(lab: Lab) -> None:
    engine = lab.engine(Bench(n_slots=1))
    one = case(lab, ASKS, max_tokens=400)
    for name in ("first", "second"):
        engine.add(lab.slot(name, one, Bench()))
    engine.step()
    engine.seats.waiting.queue_s = 1e-6
    (request_id, event), *others = engine.step()
    assert request_id == "second"
    assert isinstance(event, Failed)
    assert isinstance(event.error, Overloaded)
    assert "--max-queue-wait" in str(event.error)
    assert [name for name, _ in others] == ["first"], "the running request goes on"
    engine.seats.waiting.request_s = 1e-6
    ((request_id, event),) = engine.step()
    assert request_id == "first"
    assert isinstance(event, Failed)
    assert isinstance(event.error, TimedOut)
    assert "--request-timeout" in str(event.error)
    assert not engine.busy
    assert engine.stats().n_pages_held == 0


# --- text ---


def test_bytes_of_tokens_are_the_texts_bytes(lab: Lab) -> None:
    for text in (TEXT, "größer ≥ 😀\t\x00 ", "日本語のテキスト"):
        ids = lab.tokenizer.encode(text, add_special=False)
        assert b"".join(map(lab.tokenizer.token_bytes, ids)) == text.encode()
    assert lab.tokenizer.token_bytes(2) == b"<|im_end|>"
    assert lab.tokenizer.token_bytes(10**6) == b""


def test_a_vocabulary_without_infill_tokens_says_so(lab: Lab) -> None:
    with pytest.raises(
        Unsupported, match="suffix: this model's tokenizer has no tokens to fill in the middle"
    ):
        lab.tokenizer.infill("a", "b")


@pytest.mark.parametrize("family", ["fim", "code"])
def test_text_to_fill_in_stands_between_the_vocabularys_own_tokens(tmp_path: Path, family: str) -> None:
    shutil.copytree(DEMO.target, tmp_path, dirs_exist_ok=True)
    made = HFTokenizer.from_file(str(tmp_path / "tokenizer.json"))
    marks = [f"<|{family}_{part}|>" for part in ("prefix", "suffix", "middle")]
    made.add_special_tokens(marks)
    made.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer(tmp_path)
    before, middle, after = (made.token_to_id(one) for one in marks)
    plain = [made.encode(one, add_special_tokens=False).ids for one in ("def f(", "return x")]
    ids = tokenizer.infill("def f(", "return x")
    assert ids == [before, *plain[0], middle, *plain[1], after]
    # Text that spells a mark is text.
    assert tokenizer.infill(marks[2], "").count(after) == 1


def test_bytes_of_sentencepiece_tokens(tmp_path: Path) -> None:
    vocabulary = {"<unk>": 0, "<0xE2>": 1, "\u2581hi": 2, "<0xZZ>": 3}
    made = HFTokenizer(BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True))
    made.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    made.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer(tmp_path)
    assert [tokenizer.token_bytes(i) for i in range(1, 4)] == [b"\xe2", b" hi", b"<0xZZ>"]


def test_a_schema_without_a_finite_instance_is_the_callers_fault(lab: Lab) -> None:
    schema = {"type": "object", "properties": {"name": {"$ref": "#"}}, "required": ["name"]}
    asks = replace(ASKS, grammar=Grammar("json_schema", json.dumps(schema | {"additionalProperties": False})))
    for types in ((), ("forced",)):
        played = play(lab, Bench(types), [case(lab, asks)])
        assert isinstance(played.failed[0].error, InvalidRequest)


@pytest.mark.parametrize("vocab", [37, 40, 4099])
def test_every_row_of_log_probabilities_begins_at_the_same_place_in_memory(
    vocab: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a GPU's kernels for it, another runs where a row is aligned otherwise, with other last bits."""
    seen, as_it_is = [], torch.log_softmax

    def noted(rows: Tensor, dim: int) -> Tensor:
        seen.extend(row.data_ptr() % 32 for row in rows)
        return as_it_is(rows, dim)

    monkeypatch.setattr(torch, "log_softmax", noted)
    rows, ids = torch.randn(5, vocab), torch.tensor([0, 3, vocab - 1, 1, 2])
    found = Judged(rows, ids, vocab).read(ids.tolist())
    assert seen == [0] * 5
    for one, row in zip(found, as_it_is(rows.double(), -1), strict=True):
        assert one.logprob == pytest.approx(float(row[one.token_id]), abs=1e-5)
        assert len(one.top) == vocab  # nothing beyond the vocabulary
