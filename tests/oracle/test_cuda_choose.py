"""`choose` in CUDA C++, run by the emulator: the same tokens and probabilities as the definition, bit for bit."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest
import torch
from cuda.bindings import nvrtc
from cuda.pathfinder import find_nvidia_header_directory
from torch import Tensor

from slipstream.kernels.choose import cuda, noise, reference
from slipstream.kernels.choose.mass import masses, weights
from slipstream.kernels.choose.op import Choice, RowParams
from slipstream.kernels.cuda.launcher import launch
from slipstream.kernels.cuda.source import Source
from tests.emulator import emulated, needs_compiler, same
from tests.oracle.test_kernels_choose import params, random_rows
from tests.unit.test_noise import DRAWS, GUMBEL, PHILOX

pytestmark = [needs_compiler, pytest.mark.sampled(keep=4, together=True)]
ORDERS = (0, 1, 7)
LISTED = 2048  # as in cut.cuh
PARTS = Source(__file__, "../emulator/noise.cu", ("published", "draws", "gumbels", "weighed"), fuse=False)


def chosen(logits: Tensor, rows: RowParams, order: int = 0) -> Choice:
    with emulated(order=order):
        return cuda.choose(logits, rows, want_probability=True)


def assert_as_defined(logits: Tensor, rows: RowParams, order: int = 0) -> Tensor:
    """Tokens and probabilities against the reference; returns the tokens."""
    got, meant = chosen(logits, rows, order), reference.choose(logits, rows, want_probability=True)
    assert got.token_ids.tolist() == meant.token_ids.tolist()
    assert got.probability is not None
    assert meant.probability is not None
    assert same(got.probability, meant.probability)
    return got.token_ids


def normal(n_rows: int, vocab: int, seed: int = 0, scale: float = 3.0) -> Tensor:
    return torch.randn(n_rows, vocab, generator=torch.Generator().manual_seed(seed)) * scale


def words32(values: object) -> Tensor:
    """32-bit words as the int32 of the same bits."""
    return torch.tensor(values).to(torch.int32)


def unsigned(words: Tensor) -> Tensor:
    return words.to(torch.int64) & noise.WORD


# ---- what is computed per token


def test_philox_on_the_device_gives_the_published_answers() -> None:
    counters, keys, meant = (words32([case[i] for case in PHILOX]) for i in range(3))
    found = torch.empty_like(meant)
    with emulated():
        launch(PARTS, "published", (1, 1, 1), len(PHILOX), counters, keys, found)
    assert torch.equal(found, meant)


@pytest.mark.parametrize(("seed", "position"), list(DRAWS))
def test_draws_on_the_device_never_change(seed: int, position: int) -> None:
    words, found = torch.empty(5, dtype=torch.int32), torch.empty(5)
    with emulated():
        launch(PARTS, "draws", (1, 1, 1), 32, seed, position, 5, words, found)
    meant_words, meant_noise = DRAWS[seed, position]
    assert unsigned(words).tolist() == meant_words
    assert [float(x).hex() for x in found] == meant_noise


def test_gumbel_noise_has_the_bits_of_the_definition() -> None:
    """At every exponent of t, dense where the formula changes, and at random."""
    some = torch.randint(0, 2**32, (30_000,), generator=torch.Generator().manual_seed(0))
    powers = torch.cat([2**e + torch.arange(-2, 3) for e in range(2, 32)])
    near = torch.cat([c + torch.arange(-500, 500) for c in (noise.WORD - 2**30, 2**31, 2**32 - 501, 500)])
    words = torch.cat([some, powers, noise.WORD - powers, near, torch.tensor(list(GUMBEL))])
    found, floors = torch.empty(len(words)), torch.empty(len(words))
    with emulated():
        launch(PARTS, "gumbels", (1, 1, 1), 32, words.to(torch.int32), len(words), found, floors)
    assert same(found, noise.gumbel(words))
    assert [float(x).hex() for x in found[-len(GUMBEL) :]] == list(GUMBEL.values())
    below = found - floors
    assert float(below.min()) > 5e-4  # room for the fast logarithms of a GPU, which are off by 1e-6
    assert float(below.max()) < 4e-3


def test_masses_have_the_bits_of_the_definition() -> None:
    distance = -(torch.rand(50_000, generator=torch.Generator().manual_seed(0)) ** 2) * 60
    edges = torch.tensor([0.0, -1e-9, -1e-30, -44.4, -1e9, -3e38, float("-inf")])
    distance = torch.cat([edges, distance, -torch.arange(0, 3000) / 64])
    n = len(distance)
    weight, mass, bucket = (
        torch.empty(n),
        torch.empty(n, dtype=torch.int64),
        torch.empty(n, dtype=torch.int32),
    )
    with emulated():
        launch(PARTS, "weighed", (1, 1, 1), 32, distance, n, weight, mass, bucket)
    assert same(weight, weights(distance))
    assert torch.equal(mass, masses(distance))
    assert torch.equal(bucket, (distance * -64).floor().clamp(max=2047).int())


def ptx(source: Source, *, fuse: bool) -> bytes:
    """What NVRTC makes of the source before machine code, where contracted products still read fma."""

    def checked(answer: tuple[object, ...]) -> Any:
        assert int(answer[0]) == 0, answer  # type: ignore[call-overload]
        return answer[-1]

    headers = find_nvidia_header_directory("cudart")
    folders = [f"--include-path={folder}" for folder in (*source.folders, headers)]
    options = ["--gpu-architecture=compute_90a", "--std=c++17", f"--fmad={str(fuse).lower()}", *folders]
    program = checked(nvrtc.nvrtcCreateProgram(source.path.read_bytes(), b"choose.cu", 0, [], []))
    for instance in source.instances:
        checked(nvrtc.nvrtcAddNameExpression(program, instance.encode()))
    checked(nvrtc.nvrtcCompileProgram(program, len(options), [option.encode() for option in options]))
    text = b" " * checked(nvrtc.nvrtcGetPTXSize(program))
    checked(nvrtc.nvrtcGetPTX(program, text))
    return text


@pytest.mark.parametrize("source", [cuda.ROWS, PARTS], ids=str)
def test_the_compiler_fuses_no_multiplication_with_an_addition(source: Source) -> None:
    """Where it may, one rounding is left out, and the noise and masses of a GPU are not those of a CPU."""
    assert ptx(source, fuse=source.fuse).count(b"fma.rn") == 0
    assert ptx(source, fuse=True).count(b"fma.rn") > 20


# ---- whole rows


@pytest.mark.parametrize("min_p", [0.0, 0.08])
@pytest.mark.parametrize("top_p", [1.0, 0.9, 0.3])
@pytest.mark.parametrize("top_k", [0, 6])
@pytest.mark.parametrize("temperature", [0.0, 0.3, 1.0, 2.0])
def test_twenty_draws_of_every_configuration(
    temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    seed = int(temperature * 10) + 100 * top_k + int(top_p * 1000) + int(min_p * 1e5)
    rows = params(20, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, position=seed)
    tokens = assert_as_defined(normal(20, 600, seed), rows, ORDERS[seed % 3])
    assert len(set(tokens.tolist())) > 10


@pytest.mark.parametrize("trial", range(24))
def test_awkward_rows(trial: int) -> None:
    """Ties, masks, zeros of both signs, NaN, narrow and wide floats, one configuration per row."""
    assert_as_defined(*random_rows(trial), ORDERS[trial % 3])


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("vocab", [1, 31, 512, 4096, 5003, 16385])
def test_vocabularies_of_any_size(vocab: int, order: int) -> None:
    """Odd ones put rows at odd addresses; over 4096 a row has several blocks, over 8192 several weigh it."""
    n = 6 if vocab < 16000 else 3
    choices = {"top_k": [0, 3, 900, 0, 2, 40], "top_p": [1.0, 1.0, 0.99, 0.8, 0.5, 1.0]}
    rows = params(
        n, min_p=[0.0, 0.0, 0.0, 0.0, 0.0, 0.05][:n], **{name: x[:n] for name, x in choices.items()}
    )
    assert_as_defined(normal(n, vocab, vocab), rows, order)


@pytest.mark.parametrize("scale", [3.0, 0.01])
def test_the_vocabulary_of_large_models(scale: float) -> None:
    rows = params(4, top_k=[0, 0, 40_000, 50], top_p=[1.0, 0.95, 0.9, 1.0], temperature=[1.0, 0.8, 1.5, 0.0])
    assert_as_defined(normal(4, 151_936, 5, scale), rows)


@pytest.mark.parametrize("order", ORDERS)
def test_rows_too_flat_for_the_list_of_a_bucket(order: int) -> None:
    """More equal or nearly equal logits in the bucket of the cut than are noted down."""
    vocab = 2 * LISTED + 77
    logits = normal(4, vocab, 1, 1e-3)
    logits[1:3] = 0.25
    logits[2, 5:] = -0.0
    rows = params(4, top_k=[3000, 2500, 0, 2200], top_p=[1.0, 0.5, 0.7, 0.6], temperature=1.5)
    assert_as_defined(logits, rows, order)


def test_what_lies_far_below_counts_as_tokens_and_weighs_nothing() -> None:
    """top_k reaches into tokens 32 and more below the largest, some of which are -inf."""
    logits = normal(8, 700, 2, 0.5) - 60
    logits[:, 100:110] = normal(8, 10, 3, 1.0)
    logits[4:, 200:690] = float("-inf")
    rows = params(
        8, top_k=[5, 10, 11, 300, 11, 30, 400, 699], top_p=[1.0, 1.0, 1.0, 1.0, 0.999, 1.0, 1.0, 0.99]
    )
    assert_as_defined(logits, rows)
    hot = params(8, top_k=[12, 20, 300, 699] * 2, temperature=60.0, seed=list(range(9, 17)))
    tokens = assert_as_defined(logits, hot)
    assert any(not 100 <= token < 110 for token in tokens.tolist())


@pytest.mark.parametrize("order", ORDERS)
def test_equal_values_give_the_lowest_id(order: int) -> None:
    """Logits so large that the noise is rounded to whole numbers: many tokens tie, also of unequal logits."""
    logits = torch.full((24, 5000), 1e7)
    logits[:, :3000] -= 3
    assert_as_defined(logits, params(24), order)
    greedy = torch.zeros(3, 5000)
    greedy[1, [700, 4999]], greedy[2, ::2] = 2.0, -0.0
    assert assert_as_defined(greedy, params(3, temperature=[0.0, 1e-6, 1e-38]), order).tolist() == [0, 700, 0]


@pytest.mark.parametrize("top_p", [1.0, 0.9999999])
@pytest.mark.parametrize("temperature", [1.0, 0.4])
def test_the_luckiest_word_lifts_a_logit_as_far_as_noise_can(temperature: float, top_p: float) -> None:
    """Seed 3 draws 0xFFFFFFFF for token 1629 at this position: 22.87, and it wins from just above that far below."""
    position, lucky = 155_707, 1629
    words = noise.words(torch.tensor([3]), torch.tensor([position]), 2000)[0]
    assert int(words[lucky]) == noise.WORD
    g = noise.gumbel(words).double()  # [2000]
    logits = torch.full((2, 2000), float("-inf"))
    logits[:, 5] = 0.0
    logits[:, lucky] = ((g[5] - g[lucky] + torch.tensor([1e-3, -1e-3])) * temperature).float()
    rows = params(2, seed=3, position=position, temperature=temperature, top_p=top_p)
    assert assert_as_defined(logits, rows).tolist() == (
        [lucky, 5] if top_p == 1 or temperature < 1 else [5, 5]
    )


def test_values_beyond_float32() -> None:
    """logit / temperature is infinite for several tokens: the lowest id of those, and nothing behind the row."""
    logits = normal(2, 5001, 4) - 50
    logits[:, [4300, 777, 4999]] = 3e37
    for rows in (params(2, temperature=1e-4), params(2, temperature=1e-4, top_k=2)):
        assert assert_as_defined(logits, rows).tolist() == [777, 777]


@pytest.mark.parametrize("top_p", [1.0, 0.9])
def test_a_row_without_numbers_is_marked_and_harms_no_other(top_p: float) -> None:
    logits = normal(7, 4500)
    clean = logits.clone()
    logits[1, 4499], logits[2], logits[3, 4] = float("nan"), float("-inf"), float("inf")
    logits[4], logits[5, :4400] = float("nan"), float("-inf")
    rows = params(7, temperature=[0.0, 0.0, 1.0, 0.0, 1.0, 1.0, 1.0], top_p=top_p)
    tokens = assert_as_defined(logits, rows)
    assert [token >= 0 for token in tokens.tolist()] == [True, False, False, False, False, True, True]
    assert tokens[[0, 6]].tolist() == chosen(clean, rows).token_ids[[0, 6]].tolist()


def test_a_row_does_not_depend_on_its_company() -> None:
    logits = normal(64, 700, 8)
    rows = params(
        64,
        top_p=[1.0, 0.9] * 32,
        top_k=[0, 0, 40, 7] * 16,
        temperature=[1.0, 0.7, 1.3, 0.0, 2.0, 0.4, 1.0, 1.0] * 8,
    )
    whole = chosen(logits, rows)
    assert whole.probability is not None
    for first, width in ((3, 1), (10, 2), (17, 3), (30, 5), (50, 8), (40, 16)):
        part = slice(first, first + width)
        alone = RowParams(**{field.name: getattr(rows, field.name)[part] for field in fields(rows)})
        found = chosen(logits[part], alone, order=width % 3)
        assert found.probability is not None
        assert torch.equal(found.token_ids, whole.token_ids[part])
        assert same(found.probability, whole.probability[part])


def test_a_draw_just_within_and_just_beyond_a_truncation() -> None:
    """What is drawn among all tokens is the answer only where it is kept: of four equal tokens one to four are."""
    logits = torch.full((24, 40), -30.0)
    logits[:, [3, 8, 20, 31]] = 1.0
    drawn = assert_as_defined(logits, params(24)).tolist()
    assert set(drawn) == {3, 8, 20, 31}
    for kept in range(1, 5):
        for cut in ({"top_k": kept}, {"top_p": kept / 4 - 1e-4}, {"top_k": kept, "top_p": 0.999}):
            tokens = assert_as_defined(logits, params(24, **cut)).tolist()
            allowed = [3, 8, 20, 31][:kept]
            assert set(tokens) == set(allowed)
            assert [token for token in drawn if token in allowed] == [
                token for token, first in zip(tokens, drawn, strict=True) if first in allowed
            ]


def test_the_least_temperature_that_is_not_greedy() -> None:
    """Of equal logits the lowest id, up to the largest float32 below 1e-5, and any from the next one on."""
    most = torch.tensor(1e-5)
    above = torch.nextafter(most, torch.tensor(1.0))
    tokens = assert_as_defined(
        torch.zeros(2, 40), params(2, temperature=[float(most), float(above)])
    ).tolist()
    assert tokens[0] == 0 != tokens[1]


def test_a_min_p_between_two_tokens() -> None:
    logits = torch.full((32, 40), -30.0)
    logits[:, 5], logits[:, 9] = 0.0, -0.7  # the second weighs 0.4966 of the first
    for min_p, allowed in ((0.49, {5, 9}), (0.5, {5})):
        assert set(assert_as_defined(logits, params(32, min_p=min_p)).tolist()) == allowed


def test_more_open_rows_than_blocks() -> None:
    n = 300
    logits = normal(n, 24, 9, 0.5)
    top_k = [1 if row % 3 else 0 for row in range(n)]
    assert_as_defined(logits, params(n, top_k=top_k, top_p=[0.3 if row % 7 else 1.0 for row in range(n)]))


def test_narrow_and_strided_logits_and_an_unwanted_probability() -> None:
    wide = normal(3, 1400, 6)
    rows = params(3, top_p=[1.0, 0.9, 1.0])
    for logits in (wide.bfloat16(), wide.half(), wide.double(), wide[:, ::2], wide[:, 1:]):
        assert_as_defined(logits, rows)
    with emulated():
        assert cuda.choose(wide, rows).probability is None
        assert cuda.choose(wide[:0], params(0)).token_ids.shape == (0,)


def test_parameters_that_would_be_read_as_other_bits_are_refused() -> None:
    rows = params(3)
    for name, wrong in (("seed", rows.seed.int()), ("top_p", rows.top_p.double()), ("top_k", rows.top_k[:2])):
        changed = {field.name: getattr(rows, field.name) for field in fields(rows)} | {name: wrong}
        with pytest.raises(ValueError, match="one per row"):
            chosen(torch.zeros(3, 8), RowParams(**changed))
