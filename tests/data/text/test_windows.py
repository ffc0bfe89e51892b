from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
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


def gather_all(windows, epoch):
    """The inputs and the targets of all windows of an epoch."""
    return windows.gather(np.arange(len(windows)), np.full(len(windows), epoch))


def gather_counted(windows):
    """The targets that count, with their inputs."""
    inputs, targets = gather_all(windows, 0)
    counts = targets != -100
    return inputs[counts].tolist(), targets[counts].tolist()


@given(length=st.integers(4, 200), context=st.integers(1, 20), epoch=st.integers(0, 10**9))
@settings(max_examples=100)
def test_windows_lie_end_to_end_without_overlap(length, context, epoch):
    assume(length >= 2 * context)
    windows = TrainWindows(np.arange(length), context=context, seed=0)
    first = int(windows.offsets(epoch)[0])
    tokens = len(windows) * context

    inputs, targets = gather_all(windows, epoch)

    assert inputs.flatten().tolist() == list(range(first, first + tokens))
    assert torch.equal(targets, inputs + 1)
    left_out_at_both_ends = length - 1 - tokens
    assert left_out_at_both_ends < 2 * context


def test_offsets_differ_between_epochs_and_seeds():
    def offsets(seed):
        windows = TrainWindows(np.arange(100), context=7, seed=seed)
        return [int(windows.offsets(epoch)[0]) for epoch in range(100)]

    # 13 windows and one target more are 92 tokens: 9 places
    assert set(offsets(0)) == set(range(9))
    assert offsets(0) != offsets(1)


@in_one
@pytest.mark.parametrize("length", range(16, 32))
def test_every_token_is_seen_over_the_epochs(length):
    windows = TrainWindows(np.arange(length), context=8, seed=0)

    tokens = set()
    for epoch in range(100):
        inputs, targets = gather_all(windows, epoch)
        tokens.update(inputs.flatten().tolist(), targets.flatten().tolist())

    assert tokens == set(range(length))


def test_a_batch_across_two_epochs_takes_each_windows_own_offset():
    windows = TrainWindows(np.arange(100), context=7, seed=0)
    ids = np.array([3, 3, 0, 5])
    epochs = np.array([1, 2, 2, 1])

    inputs, _ = windows.gather(ids, epochs)

    for row in range(4):
        alone, _ = windows.gather(ids[[row]], epochs[[row]])
        assert torch.equal(inputs[row], alone[0])


def test_windows_never_cross_shards(tmp_path):
    shards = write_shards(np.arange(100), tmp_path, vocab_size=100, shard_tokens=30)

    inputs, targets = gather_all(TrainWindows(shards, context=4, seed=0), 5)

    assert (inputs // 30 == targets // 30).all()
    assert torch.equal(inputs + 1, targets)
    assert len(inputs) == 3 * 6 + 1  # (30 - 4) // 4 in each whole shard, (10 - 4) // 4 in the last


def test_windows_of_one_shard_are_those_of_the_array(tmp_path):
    tokens = np.random.default_rng(0).integers(0, 70_000, 500)
    shards = write_shards(tokens, tmp_path, vocab_size=70_000)

    inputs, targets = gather_all(TrainWindows(shards, context=9, seed=4), 2)

    array_inputs, array_targets = gather_all(TrainWindows(tokens, context=9, seed=4), 2)
    assert torch.equal(inputs, array_inputs)
    assert torch.equal(targets, array_targets)


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.int64])
def test_batches_are_int64_and_can_be_viewed(dtype):
    windows = TrainWindows(np.arange(60).astype(dtype), context=9, seed=0)

    for tokens in gather_all(windows, 0):
        assert tokens.dtype == torch.int64
        assert tokens.view(-1).shape == (5 * 9,)


@given(length=st.integers(2, 200), context=st.integers(1, 20))
@settings(max_examples=100)
def test_held_out_counts_every_target_once(length, context):
    inputs, targets = gather_counted(EvalWindows(np.arange(length), context=context))

    assert targets == list(range(1, length))
    assert inputs == list(range(length - 1))


def test_held_out_over_shards_counts_every_target_but_each_shards_first_token(tmp_path):
    shards = write_shards(np.arange(100), tmp_path, vocab_size=100, shard_tokens=33)

    _, targets = gather_counted(EvalWindows(shards, context=7))

    assert sorted(targets) == [token for token in range(100) if token % 33]


def test_filling_is_an_embeddable_input_and_an_ignored_target():
    inputs, targets = gather_all(EvalWindows(np.arange(10, 15), context=3), 0)

    assert inputs.tolist() == [[10, 11, 12], [13, 0, 0]]
    assert targets.tolist() == [[11, 12, 13], [14, -100, -100]]


@pytest.mark.parametrize("batch_size", [1, 5, 64])
def test_a_mean_over_held_out_targets_does_not_depend_on_the_batch_size(batch_size):
    tokens = np.random.default_rng(0).integers(0, 9, 203)
    windows = EvalWindows(tokens, context=8)

    total = 0
    count = 0
    for micro_batch in in_order(windows, batch_size=batch_size, seed=0, device=torch.device("cpu")):
        _, targets = micro_batch.batch
        counted_targets = targets[targets >= 0]
        total += int(counted_targets.sum())
        count += len(counted_targets)

    assert total == tokens[1:].sum()
    assert count == 202


def test_both_are_sound_data_sets():
    assert check_samples(TrainWindows(np.arange(100), context=7, seed=0), seed=0) == 13
    assert check_samples(EvalWindows(np.arange(100), context=7), seed=0) == 15


def test_fingerprint_tells_tokens_and_context_apart():
    tokens = np.arange(100)

    first = fingerprint(TrainWindows(tokens, context=7, seed=0))
    of_other_tokens = fingerprint(TrainWindows(tokens + 1, context=7, seed=0))
    of_other_context = fingerprint(TrainWindows(tokens, context=8, seed=0))

    assert first != of_other_tokens
    assert first != of_other_context
    assert of_other_tokens != of_other_context


def test_fingerprint_does_not_depend_on_the_type_of_tokens():
    tokens = np.arange(100)

    first = fingerprint(TrainWindows(tokens, context=7, seed=0))

    assert fingerprint(TrainWindows(tokens.astype(np.uint8), context=7, seed=0)) == first


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
    training, validation = split_sequence(load_documents(DATA / "tinyshakespeare")["input.txt"])
    tokenizer = CharacterTokenizer.from_text(training)
    train_windows = TrainWindows(tokenizer.encode(training), context=256, seed=0)
    val_windows = EvalWindows(tokenizer.encode(validation), context=256)

    inputs, _ = gather_all(train_windows, 4)
    _, targets = gather_counted(val_windows)

    assert tokenizer.vocab_size == 65
    first = int(train_windows.offsets(4)[0])
    assert tokenizer.decode(inputs.flatten()) == training[first : first + inputs.numel()]
    assert len(inputs) == len(train_windows)
    assert tokenizer.decode(targets) == validation[1:]


def first_inputs(windows):
    inputs, _ = gather_all(windows, 0)
    return inputs[:, 0].tolist()


@pytest.mark.parametrize(("max_tokens", "windows"), [(1, 1), (50, 8), (200, 29), (None, 29)])
def test_a_part_of_the_held_out_tokens_is_windows_of_it(max_tokens, windows):
    tokens = np.arange(203)
    whole = EvalWindows(tokens, context=7)

    part = EvalWindows(tokens, context=7, max_tokens=max_tokens, seed=3)

    assert len(part) == windows
    assert first_inputs(part) == sorted(set(first_inputs(part)))
    assert set(first_inputs(part)) <= set(first_inputs(whole))


@pytest.mark.parametrize("max_tokens", [1, 50, 200, None])
def test_a_part_of_the_held_out_tokens_is_the_same_under_a_seed(max_tokens):
    first, second = [
        EvalWindows(np.arange(203), context=7, max_tokens=max_tokens, seed=3) for _ in range(2)
    ]

    assert gather_counted(first) == gather_counted(second)
    assert first.fingerprint() == second.fingerprint()


def test_another_seed_chooses_another_part_of_the_held_out_tokens():
    first, second = [
        EvalWindows(np.arange(203), context=7, max_tokens=50, seed=seed) for seed in (3, 4)
    ]

    assert gather_counted(first) != gather_counted(second)
    assert first.fingerprint() != second.fingerprint()
