from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from data_sets import DATA, needs
from in_one import in_one
from refused import refused
from surefoot.data.dataset_checks import check_samples, fingerprint
from surefoot.data.loader import in_order
from surefoot.data.text.shards import write_shards
from surefoot.data.text.windows import EvalWindows, TrainWindows
from surefoot.errors import DataError
from surefoot.recipes.readers.text.corpora import split_sequence
from surefoot.recipes.readers.text.documents import load_documents
from surefoot.tokenizers.tokenizer import CharacterTokenizer


def gathered(windows, epoch):
    inputs, targets = windows.gather(np.arange(len(windows)), np.full(len(windows), epoch))
    return inputs, targets


def counted(held_out):
    inputs, targets = gathered(held_out, 0)
    kept = targets != -100
    return inputs[kept].tolist(), targets[kept].tolist()


@given(length=st.integers(4, 200), context=st.integers(1, 20), epoch=st.integers(0, 10**9))
@settings(max_examples=100)
def test_windows_lie_end_to_end_without_overlap(length, context, epoch):
    if length < 2 * context:
        return
    windows = TrainWindows(np.arange(length), context=context, seed=0)
    inputs, targets = gathered(windows, epoch)
    first = int(windows.offsets(epoch)[0])
    assert inputs.flatten().tolist() == list(range(first, first + len(windows) * context))
    assert torch.equal(targets, inputs + 1)
    assert (
        length - 1 - len(windows) * context < 2 * context
    )  # what an epoch leaves out, at both ends together


def test_offsets_differ_between_epochs_and_seeds():
    def offsets(seed):
        windows = TrainWindows(np.arange(100), context=7, seed=seed)
        return [int(windows.offsets(epoch)[0]) for epoch in range(100)]

    assert set(offsets(0)) == set(
        range(9)
    )  # 13 windows and one target more are 92 tokens: 9 places
    assert offsets(0) != offsets(1)


@in_one
@pytest.mark.parametrize("length", range(16, 32))
def test_every_token_is_seen_over_the_epochs(length):
    windows = TrainWindows(np.arange(length), context=8, seed=0)
    seen = {
        token
        for epoch in range(100)
        for part in gathered(windows, epoch)
        for token in part.flatten().tolist()
    }
    assert seen == set(range(length))


def test_a_batch_across_two_epochs_takes_each_windows_own_offset():
    windows = TrainWindows(np.arange(100), context=7, seed=0)
    ids, epochs = np.array([3, 3, 0, 5]), np.array([1, 2, 2, 1])
    mixed = windows.gather(ids, epochs)
    for row in range(4):
        assert torch.equal(
            mixed[0][row], windows.gather(ids[row : row + 1], epochs[row : row + 1])[0][0]
        )


def test_windows_never_cross_shards(tmp_path):
    shards = write_shards(np.arange(100), tmp_path, vocab_size=100, shard_tokens=30)
    inputs, targets = gathered(TrainWindows(shards, context=4, seed=0), 5)
    assert (inputs // 30 == targets // 30).all()
    assert torch.equal(inputs + 1, targets)
    assert len(inputs) == 3 * 6 + 1  # (30 - 4) // 4 in each whole shard, (10 - 4) // 4 in the last


def test_windows_of_one_shard_are_those_of_the_array(tmp_path):
    tokens = np.random.default_rng(0).integers(0, 70_000, 500)
    shards = write_shards(tokens, tmp_path, vocab_size=70_000)
    for of_shards, of_array in zip(
        gathered(TrainWindows(shards, context=9, seed=4), 2),
        gathered(TrainWindows(tokens, context=9, seed=4), 2),
        strict=True,
    ):
        assert torch.equal(of_shards, of_array)


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.int64])
def test_batches_are_int64_and_can_be_viewed(dtype):
    for part in gathered(TrainWindows(np.arange(60).astype(dtype), context=9, seed=0), 0):
        assert part.dtype == torch.int64
        assert part.view(-1).shape == (5 * 9,)


@given(length=st.integers(2, 200), context=st.integers(1, 20))
@settings(max_examples=100)
def test_held_out_counts_every_target_once(length, context):
    inputs, targets = counted(EvalWindows(np.arange(length), context=context))
    assert targets == list(range(1, length))
    assert inputs == list(range(length - 1))


def test_held_out_over_shards_counts_every_target_but_each_shards_first_token(tmp_path):
    shards = write_shards(np.arange(100), tmp_path, vocab_size=100, shard_tokens=33)
    assert sorted(counted(EvalWindows(shards, context=7))[1]) == [
        token for token in range(100) if token % 33
    ]


def test_filling_is_an_embeddable_input_and_an_ignored_target():
    inputs, targets = gathered(EvalWindows(np.arange(10, 15), context=3), 0)
    assert inputs.tolist() == [[10, 11, 12], [13, 0, 0]]
    assert targets.tolist() == [[11, 12, 13], [14, -100, -100]]


@pytest.mark.parametrize("batch_size", [1, 5, 64])
def test_a_mean_over_held_out_targets_does_not_depend_on_the_batch_size(batch_size):
    held_out = EvalWindows(np.random.default_rng(0).integers(0, 9, 203), context=8)
    total = count = 0
    for one in in_order(held_out, batch_size=batch_size, seed=0, device=torch.device("cpu")):
        kept = one.batch[1] >= 0
        total = total + int(one.batch[1][kept].sum())
        count = count + int(kept.sum())
    assert (total, count) == (int(held_out.arrays[0][1:].sum()), 202)


def test_both_are_sound_data_sets():
    assert check_samples(TrainWindows(np.arange(100), context=7, seed=0), seed=0) == 13
    assert check_samples(EvalWindows(np.arange(100), context=7), seed=0) == 15


def test_fingerprint_tells_tokens_and_context_apart():
    tokens = np.arange(100)
    found = [
        fingerprint(TrainWindows(array, context=context, seed=0))
        for array, context in ((tokens, 7), (tokens + 1, 7), (tokens, 8))
    ]
    assert found[0] != found[1] != found[2] != found[0]
    assert fingerprint(TrainWindows(tokens.astype(np.uint8), context=7, seed=0)) == found[0]


@pytest.mark.parametrize("length", [0, 1, 13])
def test_too_few_tokens_for_the_context_are_refused(length):
    with refused("text-shorter-than-context", DataError, context=7, longest=length):
        TrainWindows(np.arange(length), context=7, seed=0)


def test_the_longest_piece_is_told_where_none_holds_a_window(tmp_path):
    shards = write_shards(np.arange(20) % 9, tmp_path, vocab_size=9, shard_tokens=8)
    with refused("text-shorter-than-context", DataError, context=7, longest=8):
        TrainWindows(shards, context=7, seed=0)


@pytest.mark.parametrize("length", [0, 1])
def test_held_out_without_a_target_is_refused(length):
    with refused("held-out-text-too-short", DataError):
        EvalWindows(np.arange(length), context=7)


@pytest.mark.parametrize("tokens", [np.zeros((3, 3), int), np.zeros(9), np.array(["a"])])
def test_what_is_no_row_of_numbers_is_refused(tokens):
    with refused("tokens-not-integers", DataError, shape=list(tokens.shape)):
        TrainWindows(tokens, context=2, seed=0)


def test_a_context_of_nothing_is_refused():
    with refused("setting-out-of-range", setting="context", value=0):
        TrainWindows(np.arange(9), context=0, seed=0)


@needs("tinyshakespeare")
def test_tiny_shakespeare_is_covered_whole():
    training, held_out = split_sequence(load_documents(DATA / "tinyshakespeare")["input.txt"])
    tokenizer = CharacterTokenizer.from_text(training)
    assert tokenizer.vocab_size == 65
    windows = TrainWindows(tokenizer.encode(training), context=256, seed=0)
    first = int(windows.offsets(4)[0])
    assert (
        tokenizer.decode(gathered(windows, 4)[0].flatten())
        == training[first : first + len(windows) * 256]
    )
    assert (
        tokenizer.decode(counted(EvalWindows(tokenizer.encode(held_out), context=256))[1])
        == held_out[1:]
    )


@pytest.mark.parametrize(("max_tokens", "windows"), [(1, 1), (50, 8), (200, 29), (None, 29)])
def test_a_part_of_the_held_out_tokens_is_windows_of_it_that_the_seed_chooses(
    max_tokens: int | None, windows: int
) -> None:
    tokens = np.arange(203)
    every = EvalWindows(tokens, context=7)
    part, again, other = (
        EvalWindows(tokens, context=7, max_tokens=max_tokens, seed=seed) for seed in (3, 3, 4)
    )
    chosen = [int(part.gather(np.array([row]), np.array([0]))[0][0, 0]) for row in range(len(part))]
    assert len(part) == windows
    assert chosen == sorted(set(chosen))
    assert set(chosen) <= {
        int(every.gather(np.array([row]), np.array([0]))[0][0, 0]) for row in range(len(every))
    }
    assert part.fingerprint() == again.fingerprint()
    if windows == 8:
        assert counted(part) == counted(again) != counted(other)
        assert part.fingerprint() != other.fingerprint()
