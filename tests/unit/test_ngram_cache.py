"""ngram-cache, its counted n-grams and their files."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from slipstream.engine.errors import LoadError, SettingError
from slipstream.engine.slot import Slot
from slipstream.engine.speculate.drafter import NO_DRAFT, Guess, Kept, Want
from slipstream.engine.speculate.ngram import count_file as ngram_file
from slipstream.engine.speculate.ngram import counts as ngram_counts
from slipstream.engine.speculate.ngram import ngram_cache
from slipstream.engine.speculate.ngram.counts import NgramCounts
from slipstream.engine.speculate.ngram.ngram_cache import NgramCache
from tests.unit.toy import toy_slot

VOCAB = 1000

texts = st.lists(st.integers(0, 3), min_size=1, max_size=60)
Counted = dict[tuple[int, ...], dict[int, int]]


def words(*values: int) -> NDArray[np.int32]:
    return np.array(values, np.int32)


def slot_of(tokens: Sequence[int], slot_id: int = 0) -> Slot:
    return toy_slot(f"r{slot_id}", list(tokens), slot_id=slot_id, n_max=16, max_tokens=10_000)


def began(drafter: NgramCache, tokens: Sequence[int], slot_id: int = 0) -> Slot:
    slot = slot_of(tokens, slot_id)
    drafter.begin(slot)
    return slot


def guess(drafter: NgramCache, slot: Slot, n_max: int = 16, after: Sequence[int] = ()) -> Guess:
    return drafter.draft([Want(slot, n_max, after)])[0]


def keep(drafter: NgramCache, slot: Slot, tokens: Sequence[int]) -> None:
    for token_id in tokens:
        slot.append(token_id)
    drafter.accept([Kept(slot, NO_DRAFT, 0)])


def counted(records: ngram_file.Records) -> Counted:
    grams, followers = records
    found: Counted = {tuple(t for t in gram if t >= 0): {} for gram in grams.tolist()}
    for row, token, count in followers.tolist():
        followers_of = found[tuple(t for t in grams[row].tolist() if t >= 0)]
        assert token not in followers_of
        followers_of[token] = count
    return found


class Plain:
    """Counted n-grams as one would write them down: n-gram -> follower -> count, in order of first sight."""

    def __init__(self) -> None:
        self.counts: Counted = {}
        self.best: dict[tuple[int, ...], int] = {}

    def count(self, gram: tuple[int, ...], token: int, n: int = 1) -> None:
        followers = self.counts.setdefault(gram, {})
        followers[token] = followers.get(token, 0) + n
        if followers[token] >= followers.get(self.best.get(gram, token), 0):
            self.best[gram] = token

    def learn(self, tokens: Sequence[int]) -> Plain:
        for i, token in enumerate(tokens):
            for n in range(1, min(4, i) + 1):
                self.count(tuple(tokens[i - n : i]), token)
        return self

    @classmethod
    def of(cls, records: ngram_file.Records, only: int | None = None) -> Plain:
        grams, followers = records
        plain = cls()
        for row, token, n in followers.tolist():
            gram = tuple(t for t in grams[row].tolist() if t >= 0)
            if only is None or len(gram) == only:
                plain.count(gram, token, n)
        return plain

    def vote(
        self, gram: tuple[int, ...], static: dict[int, int], least: int, share: int
    ) -> tuple[int, int, int] | None:
        followers = self.counts.get(gram)
        if not followers:
            return None
        best, total = self.best[gram], sum(followers.values())
        if static:
            best = max(reversed(followers), key=lambda t: followers[t] * (100 * static.get(t, 0) or 1))
        if total < least or 100 * followers[best] < share * total:
            return None
        return best, followers[best], total


def plain_guess(
    text: list[int], n_most: int, context: Plain, dynamic: Plain, static: Plain
) -> list[tuple[int, float]]:
    """What the rules say, token by token, with the survival of each."""
    found: list[tuple[int, float]] = []
    while len(found) < n_most:
        bigram = static.counts.get(tuple(text[-2:]), {}) if len(text) > 1 else {}
        votes = [
            source.vote(tuple(text[-n:]), bigram, least[n - 1], share[n - 1])
            for source, least, share in (
                (context, (2, 2, 1, 1), (66, 50, 50, 50)),
                (dynamic, (4, 3, 2, 2), (75, 66, 66, 66)),
            )
            for n in range(min(4, len(text)), 0, -1)
        ]
        if len(text) > 1:
            votes.append(static.vote(tuple(text[-2:]), {}, 2, 50))
        vote = next((one for one in votes if one is not None), None)
        if vote is None:
            break
        token, count, total = vote
        found.append((token, (count + 1) / (total + 2)))
        text = [*text, token]
    return found


@settings(max_examples=150, deadline=None)
@given(texts, st.lists(st.integers(0, 3), max_size=4), texts, texts)
def test_drafts_follow_the_rules_token_by_token(
    tokens: list[int], after: list[int], dynamic: list[int], static: list[int]
) -> None:
    drafter = NgramCache(1, None, None, VOCAB)
    counts = NgramCounts()
    counts.learn(np.array(dynamic * 3, np.int32), 0)
    drafter._dynamic.add(*counts.records())
    grams, bigrams = np.stack((static[:-1], static[1:]), axis=1), words(*static[2:])
    padded = np.pad(grams, ((0, 0), (0, 2)), constant_values=-1).astype(np.int32)
    followers = np.stack((np.arange(len(bigrams)), bigrams, 1 + bigrams % 2), axis=1).astype(np.int32)
    drafter._static.add(padded, followers)
    sources = Plain().learn(tokens), Plain.of(counts.records()), Plain.of((padded, followers))
    expected = plain_guess(tokens + after, 8, *sources)
    found = guess(drafter, began(drafter, tokens), 16, after)
    assert list(found.token_ids) == [token for token, _ in expected]
    assert found.survival == pytest.approx([survival for _, survival in expected])


def test_the_static_file_is_asked_last_and_of_its_ngrams_only_those_of_two_tokens(tmp_path: Path) -> None:
    path = tmp_path / "counts"
    bigrams = words(1, 2, -1, -1, 1, 3, 2, 2, 3, -1, -1, 1, 4, 1)
    others = words(7, -1, -1, -1, 1, 8, 9, 5, 6, 7, -1, 1, 8, 9)
    np.concatenate((bigrams, others)).tofile(path)
    drafter = NgramCache(1, path, None, VOCAB)
    # "2 3" was seen once, which is too little.
    assert guess(drafter, began(drafter, [1, 2])).token_ids == [3]
    assert not guess(drafter, began(drafter, [5, 6, 7]))
    assert guess(drafter, began(drafter, [5, 1, 2, 9, 5, 1, 2])).token_ids[0] == 9


def test_counts_of_the_static_file_settle_a_tie(tmp_path: Path) -> None:
    path, tied = tmp_path / "counts", [5, 1, 2, 3, 6, 1, 2, 4, 7, 1, 2]
    words(1, 2, -1, -1, 1, 3, 1).tofile(path)
    for static, token in ((None, 4), (path, 3)):
        drafter = NgramCache(1, static, None, VOCAB)
        assert guess(drafter, began(drafter, tied)).token_ids[0] == token


@settings(max_examples=60, deadline=None)
@given(
    texts,
    texts,
    st.lists(
        st.tuples(
            st.integers(0, 1),
            st.one_of(st.lists(st.integers(0, 3), min_size=1, max_size=6), st.integers(0, 12)),
        ),
        max_size=12,
    ),
)
def test_state_is_that_of_a_drafter_that_saw_the_text_at_once(
    one: list[int], two: list[int], steps: list[tuple[int, list[int] | int]]
) -> None:
    drafter = NgramCache(2, None, None, VOCAB)
    slots = [began(drafter, one, 0), began(drafter, two, 1)]
    for which, change in steps:
        if isinstance(change, int):
            slots[which].truncate(len(slots[which].tokens) - change)
            drafter.begin(slots[which])
        else:
            guess(drafter, slots[which], 4, [1, 2, 1, 2])
            keep(drafter, slots[which], change)
    for slot in slots:
        fresh = NgramCache(2, None, None, VOCAB)
        again = began(fresh, slot.tokens, slot.id)
        assert guess(drafter, slot) == guess(fresh, again)
        assert rows(drafter, slot.id) == rows(fresh, slot.id)
        assert counted(context(drafter, slot.id).records()) == Plain().learn(slot.tokens).counts


def context(drafter: NgramCache, slot_id: int) -> NgramCounts:
    counts = drafter._context[slot_id]
    assert counts is not None
    return counts


def rows(drafter: NgramCache, slot_id: int) -> list[list[int]]:
    _, table, sizes = context(drafter, slot_id).table
    return table[: sizes[0]].tolist()  # type: ignore[no-any-return]


def test_ngrams_across_the_borders_of_steps_are_learnt() -> None:
    drafter = NgramCache(1, None, None, VOCAB)
    slot = began(drafter, [1])
    for token_id in (2, 3, 4, 5, 9, 1, 2, 3, 4):
        keep(drafter, slot, [token_id])
    assert guess(drafter, slot).token_ids[:2] == [5, 9]


def test_drafts_have_eight_tokens_at_most() -> None:
    drafter = NgramCache(1, None, None, VOCAB)
    slot = began(drafter, [*range(20), *range(5)])
    assert guess(drafter, slot, 16).token_ids == [5, 6, 7, 8, 9, 10, 11, 12]
    assert guess(drafter, slot, 3).token_ids == [5, 6, 7]
    assert guess(drafter, slot, 3, [5, 6]).token_ids == [7, 8, 9]


def test_nothing_of_a_request_reaches_the_next() -> None:
    drafter = NgramCache(1, None, None, VOCAB)
    slot = began(drafter, [1, 2, 3, 4, 5, 1, 2, 3, 4])
    assert guess(drafter, slot)
    drafter.end(slot)
    assert drafter._context == [None]
    assert len(drafter._dynamic.records()[1]) == 0
    assert not guess(drafter, began(drafter, [1, 2, 3, 4]))
    drafter.end(slot)
    drafter.begin(slot)
    drafter.begin(slot_of([1, 2, 3, 4]))
    assert not guess(drafter, slot_of([1, 2, 3, 4]))


def test_a_text_that_became_shorter_unannounced_is_learnt_anew() -> None:
    drafter = NgramCache(1, None, None, VOCAB)
    slot = began(drafter, [1, 2])
    keep(drafter, slot, [3, 1, 2, 3, 1, 2])
    assert guess(drafter, slot)
    slot.truncate(2)
    assert not guess(drafter, slot)


def use() -> None:
    """Fails if using a drafter compiles what building it did not."""

    def n_compiled() -> dict[str, int]:
        functions = {
            name: value for name, value in vars(ngram_counts).items() if hasattr(value, "signatures")
        }
        return {name: len(function.signatures) for name, function in functions.items()}

    drafter = NgramCache(2, None, "unused", VOCAB)
    built = n_compiled()
    assert len(built) > 10
    for text in (range(300), [1, 2, 3] * 100, [1], [2]):
        slot = began(drafter, text)
        guess(drafter, slot, 1)
        keep(drafter, slot, range(100))
        guess(drafter, slot, 16, [1, 2, 3])
        drafter.end(slot)
    assert n_compiled() == built


def test_dynamic_counts_pass_from_request_to_request_and_through_the_file(tmp_path: Path) -> None:
    path = tmp_path / "counts"
    text = [1, 2, 3, 4, 5, 6]
    first = NgramCache(2, None, path, VOCAB)
    for slot_id in (0, 1, 0):
        first.end(began(first, text, slot_id))
    assert not path.exists()
    first.close()
    second = NgramCache(1, None, path, VOCAB)
    for drafter in (first, second):
        assert not guess(drafter, began(drafter, [3]))  # a unigram must have been seen four times
        assert guess(drafter, began(drafter, [2, 3])).token_ids == [4, 5, 6]
    second.end(began(second, text))
    second.save()
    found = counted(ngram_file.read(path, VOCAB))
    assert found[(2, 3)] == {4: 4}
    assert found[(2, 3, 4, 5)] == {6: 4}
    assert [one.name for one in tmp_path.iterdir()] == ["counts"]


def test_an_ended_request_is_counted_once_however_often_it_began() -> None:
    counts = Plain().learn([1, 2, 1, 2, 1])
    drafter = NgramCache(1, None, "unused", VOCAB)
    slot = began(drafter, [1, 2, 1])
    keep(drafter, slot, [2, 2])
    slot.truncate(3)
    drafter.begin(slot)
    keep(drafter, slot, [2, 1])
    drafter.end(slot)
    drafter.end(slot)
    assert counted(drafter._dynamic.records()) == counts.counts


def test_the_dynamic_table_stops_growing_and_says_so_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(ngram_cache, "MOST_ROWS", 300)
    drafter = NgramCache(1, None, "unused", VOCAB)
    known = [1, 2, 3, 4]
    with caplog.at_level(logging.WARNING):
        for first in range(0, 600, 50):
            drafter.end(began(drafter, known + list(range(first, first + 50))))
    assert [record.message for record in caplog.records] == [
        f"dynamic n-grams are full, new ones are left out path={Path('unused').resolve()} most=300"
    ]
    _, table, sizes = drafter._dynamic.table
    assert sizes[0] <= len(table) == 300
    assert counted(drafter._dynamic.records())[(1, 2)][3] == 13


def test_counts_are_for_their_owner_alone_and_parts_are_removed(tmp_path: Path) -> None:
    path = tmp_path / "counts"
    (tmp_path / "counts.1.part").write_bytes(b"half")
    NgramCache(1, None, path, VOCAB).save()
    assert [(one.name, one.stat().st_mode & 0o777) for one in tmp_path.iterdir()] == [("counts", 0o600)]
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(LoadError, match="not a regular file"):
        NgramCache(1, None, path, VOCAB)


@pytest.mark.parametrize("is_there", [True, False])
def test_what_a_link_points_to_is_written(tmp_path: Path, *, is_there: bool) -> None:
    (tmp_path / "volume").mkdir()
    kept, link = tmp_path / "volume" / "counts", tmp_path / "counts"
    if is_there:
        NgramCache(1, None, kept, VOCAB).save()
    link.symlink_to(kept)
    drafter = NgramCache(1, None, link, VOCAB)
    drafter.end(began(drafter, [1, 2, 3]))
    drafter.close()
    assert link.is_symlink()
    assert kept.stat().st_size > 0


def test_what_cannot_be_saved_is_logged_when_closing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "folder").mkdir()
    drafter = NgramCache(1, None, tmp_path / "folder" / "counts", VOCAB)
    drafter.end(began(drafter, [1, 2, 3]))
    (tmp_path / "folder").rmdir()
    with pytest.raises(OSError, match="counts"):
        drafter.save()
    drafter.close()
    assert str(tmp_path / "folder" / "counts") in caplog.text
    NgramCache(1, None, None, VOCAB).close()


def test_a_file_that_cannot_be_replaced_leaves_nothing_behind(tmp_path: Path) -> None:
    (tmp_path / "counts").mkdir()
    with pytest.raises(OSError, match="counts"):
        ngram_file.write(tmp_path / "counts", NgramCounts().records())
    assert [one.name for one in tmp_path.iterdir()] == ["counts"]


@settings(max_examples=100, deadline=None)
@given(st.lists(texts, min_size=1, max_size=3))
def test_files_give_back_what_was_written(
    tmp_path_factory: pytest.TempPathFactory, several: list[list[int]]
) -> None:
    path = tmp_path_factory.getbasetemp() / "round"
    counts, plain = NgramCounts(), Plain()
    for text in several:
        one = NgramCounts()
        one.learn(np.array(text, np.int32), 0)
        counts.add(*one.records())
        for gram, followers in Plain().learn(text).counts.items():
            for token, n in followers.items():
                plain.count(gram, token, n)
    ngram_file.write(path, counts.records())
    again = NgramCounts()
    again.add(*ngram_file.read(path, 4))
    assert counted(ngram_file.read(path, 4)) == counted(again.records()) == plain.counts


def test_counts_of_many_tokens_survive_the_growth_of_the_table() -> None:
    text = np.random.default_rng(5).zipf(1.4, 6000).clip(0, 500).astype(np.int32)
    counts = NgramCounts()
    for at in range(0, len(text), 7):
        counts.learn(text[: at + 7], at)
    assert counted(counts.records()) == Plain().learn(text.tolist()).counts


def test_files_are_those_of_llama_cpp(tmp_path: Path) -> None:
    path = tmp_path / "counts"
    counts = NgramCounts()
    counts.learn(words(7, 8, 7, 9), 0)
    ngram_file.write(path, counts.records())
    data = np.fromfile(path, np.int32).tolist()
    records = {
        (7, -1, -1, -1): {(8, 1), (9, 1)},
        (8, -1, -1, -1): {(7, 1)},
        (7, 8, -1, -1): {(7, 1)},
        (8, 7, -1, -1): {(9, 1)},
        (7, 8, 7, -1): {(9, 1)},
    }
    found = {}
    while data:
        n = data[4]
        found[tuple(data[:4])] = set(zip(data[5 : 5 + 2 * n : 2], data[6 : 6 + 2 * n : 2], strict=True))
        del data[: 5 + 2 * n]
    assert found == records


GOOD = (1, 2, -1, -1, 1, 3, 5)


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        (words(*GOOD, 1, 2, -1), "ends within a record"),
        (words(*GOOD, 1, 2, -1, -1, 2, 3, 5), "ends within a record"),
        (words(*GOOD, 1, 2, -1, -1, 2**31 - 1, 3, 5), "ends within a record"),
        (words(*GOOD, -1, -1, -1, -1, 1, 3, 5), "not 1 to 4 tokens"),
        (words(*GOOD, 1, -1, 2, -1, 1, 3, 5), "not 1 to 4 tokens"),
        (words(*GOOD, 1, VOCAB, -1, -1, 1, 3, 5), "not 1 to 4 tokens"),
        (words(*GOOD, 1, 2, -1, -2, 1, 3, 5), "not 1 to 4 tokens"),
        (words(*GOOD, 1, 2, -1, -1, 0), "no followers"),
        (words(*GOOD, 1, 2, -1, -1, -1, 3, 5), "no followers"),
        (words(*GOOD, 1, 2, -1, -1, 1, VOCAB, 5), "follower is not in the vocabulary"),
        (words(*GOOD, 1, 2, -1, -1, 1, -1, 5), "follower is not in the vocabulary"),
        (words(*GOOD, 1, 2, -1, -1, 1, 3, 0), "count is not between"),
        (words(*GOOD, 1, 2, -1, -1, 1, 3, 2**30 + 1), "count is not between"),
    ],
)
def test_malformed_files_are_refused_by_name(
    tmp_path: Path, bad: NDArray[np.int32], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    """One that is written at the end is put aside and made anew: it may be a save that broke off."""
    path = tmp_path / "counts"
    bad.tofile(path)
    with pytest.raises(LoadError, match=rf"counts: .*{reason}.*byte 28"):
        NgramCache(1, path, None, VOCAB)
    drafter = NgramCache(1, None, path, VOCAB)
    assert reason in caplog.text
    assert (tmp_path / "counts.damaged").read_bytes() == bad.tobytes()
    drafter.end(began(drafter, [1, 2, 3]))
    drafter.save()
    assert (1, 2) in counted(ngram_file.read(path, VOCAB))
    path.write_bytes(words(*GOOD).tobytes())
    assert counted(ngram_file.read(path, VOCAB)) == {(1, 2): {3: 5}}


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=80))
def test_no_file_is_read_half(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    path = tmp_path_factory.getbasetemp() / "noise"
    path.write_bytes(data)
    if not data:
        assert counted(ngram_file.read(path, VOCAB)) == {}
        return
    try:
        grams, followers = ngram_file.read(path, VOCAB)
    except LoadError:
        return
    assert len(data) == 4 * (5 * len(grams) + 2 * len(followers))


def test_files_that_are_not_there_or_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(LoadError, match="none: counted n-grams cannot be read: No such file"):
        NgramCache(1, tmp_path / "none", None, VOCAB)
    with pytest.raises(LoadError, match="cannot be read: Is a directory"):
        NgramCache(1, None, tmp_path, VOCAB)
    with pytest.raises(SettingError, match=r"--lookup-cache-dynamic .*none/counts: its folder"):
        NgramCache(1, None, tmp_path / "none" / "counts", VOCAB)


def test_counts_saturate(tmp_path: Path) -> None:
    path = tmp_path / "counts"
    words(1, 2, -1, -1, 2, 3, 2**30, 4, 2**30).tofile(path)
    drafter = NgramCache(1, path, path, VOCAB)
    assert guess(drafter, began(drafter, [1, 2])).token_ids == [3]
    drafter.end(began(drafter, [1, 2, 4]))
    assert counted(drafter._dynamic.records())[(1, 2)] == {3: 2**30}
