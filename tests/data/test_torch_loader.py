"""A `DataLoader` as training data or in a split: what is taken, what is named, and what is
refused.
"""

from __future__ import annotations

import inspect
import itertools
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)
from torch.utils.data.distributed import DistributedSampler

import surefoot as sf
from rank_processes import Ranks
from refused import refused
from stated import lines_naming, numbers_in
from surefoot.data.workers import Workers
from surefoot.tools.plan.summary import sections

SAMPLES = 48
X = torch.randn(SAMPLES, 4, generator=torch.Generator().manual_seed(0))
Y = torch.arange(SAMPLES) % 3


class Rows(Dataset[tuple[Tensor, Tensor]]):
    """A map-style data set."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return X[index], Y[index]


class NoLength(Dataset[tuple[Tensor, Tensor]]):
    """A data set that says nothing of its length."""

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return X[index], Y[index]


class Stream(IterableDataset[int]):
    """What a map-style loader does not hold."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(8))


class OwnBatches(DataLoader[Any]):
    """A loader whose batches are not those of its data set."""

    def __iter__(self) -> Any:
        for inputs, labels in super().__iter__():
            yield inputs + 1, labels


class Backwards(SequentialSampler):
    """A sampler that nobody knows."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(SAMPLES - 1, -1, -1))


class OwnGenerator(Backwards):
    """One that cannot be read again."""

    generator = torch.Generator()

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(SAMPLES, generator=self.generator).tolist())


def loss(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def twice(samples: list[Any]) -> list[Tensor]:
    """A collate function."""
    return [
        torch.stack([inputs for inputs, _ in samples]) * 2,
        torch.stack([label for _, label in samples]),
    ]


def loader(data: Any = None, **settings: Any) -> DataLoader[Any]:
    if data is None:
        data = Rows()
    if "batch_sampler" not in settings:
        settings = {"batch_size": 8} | settings
    return DataLoader(data, **settings)


def build(data: Any, **changes: Any) -> sf.Run:
    settings: dict[str, Any] = {
        "model": lambda: nn.Linear(4, 3),
        "loss": loss,
        "train_data": data,
        "length": "2 epochs",
        "optimizer": sf.optim.sgd(lr=0.1),
        "device": "cpu",
        "console": False,
    }
    return sf.Run(**settings | changes)


def ids(run: sf.Run) -> list[list[int]]:
    """What each step reads."""
    plan = run.parts.pipeline.plan
    ids_of_steps = []
    for step in range(run.parts.length.steps):
        of_micro_batches = [ids for ids, _ in plan.micro_batches(step)]
        ids_of_steps.append(np.concatenate(of_micro_batches).tolist())
    return ids_of_steps


def weights_of(model: nn.Module) -> Tensor:
    return nn.utils.parameters_to_vector(model.parameters()).detach()


def train_weights(run: sf.Run) -> Tensor:
    run.train()
    return weights_of(run.state.model)


def flat(batches: list[list[int]]) -> list[int]:
    return list(itertools.chain(*batches))


def chi_squared(counts: np.ndarray) -> float:
    """How far counts are from equal ones."""
    expected = counts.mean()
    return float(((counts - expected) ** 2 / expected).sum())


def test_a_port_of_an_unshuffled_loader_trains_what_the_plain_loop_trains() -> None:
    run = build(loader())
    model = nn.Linear(4, 3)
    model.load_state_dict(run.state.model.state_dict())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        for batch in loader():
            optimizer.zero_grad()
            loss(model, batch).backward()
            optimizer.step()

    assert torch.equal(train_weights(run), weights_of(model))


@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_is_the_same_run_as_its_settings(workers: int) -> None:
    run = build(loader(shuffle=True, collate_fn=twice, num_workers=workers))
    expected = train_weights(build(Rows(), batch_size=8, collate_fn=twice))

    assert run.parts.pipeline.workers == workers
    assert torch.equal(train_weights(run), expected)


@pytest.mark.parametrize("workers", [0, 2])
def test_settings_that_agree_with_the_loader_may_stand_beside_it(workers: int) -> None:
    run = build(
        loader(shuffle=True, collate_fn=twice, num_workers=workers),
        batch_size=8,
        collate_fn=twice,
        workers=workers,
        order="shuffled",
    )

    assert ids(run) == ids(build(Rows(), batch_size=8))


def test_rows_of_tensors_are_gathered_and_not_read_one_by_one() -> None:
    run = build(loader(TensorDataset(X, Y), shuffle=True))
    expected = train_weights(build((X, Y), batch_size=8))

    assert run.parts.pipeline.feed(workers=0).gather is not None
    assert torch.equal(train_weights(run), expected)


def test_rows_of_tensors_are_gathered_in_a_split_too(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = scored(sf.Split((X, Y), metrics=confident))

    def refuse(*_: Any) -> Any:
        raise AssertionError("read one by one")

    split = sf.Split(loader(TensorDataset(X, Y)), metrics=confident)
    monkeypatch.setattr(TensorDataset, "__getitem__", refuse)
    assert scored(split) == expected


@pytest.mark.parametrize(
    ("given", "order"),
    [
        pytest.param(loader(), "sequential", id="no sampler"),
        pytest.param(loader(sampler=RandomSampler(Rows())), "shuffled", id="RandomSampler"),
        pytest.param(
            loader(batch_sampler=BatchSampler(RandomSampler(Rows()), 8, drop_last=False)),
            "shuffled",
            id="BatchSampler",
        ),
    ],
)
def test_a_sampler_of_all_samples_is_an_addressed_order(given: DataLoader[Any], order: str) -> None:
    assert ids(build(given)) == ids(build(Rows(), batch_size=8, order=order))


def test_a_sampler_of_a_part_is_an_order_of_this_part() -> None:
    part = [3, 7, 40, 41, 2, 9, 10, 11]

    run = build(loader(sampler=SubsetRandomSampler(part)))

    assert sorted(ids(run)[0]) == [*range(8)]
    assert sorted(run.parts.pipeline.dataset.indices) == sorted(part)


def test_a_sampler_of_fewer_samples_repeats_none_within_an_epoch() -> None:
    steps = ids(build(loader(sampler=RandomSampler(Rows(), num_samples=16))))

    assert len({*flat(steps[:2])}) == 16
    assert len({*flat(steps[2:4])}) == 16


def test_a_sampler_with_replacement_draws_all_samples_about_as_often() -> None:
    sampler = RandomSampler(Rows(), replacement=True, num_samples=4000)

    run = build(loader(sampler=sampler))

    assert run.parts.pipeline.plan.samples == 4000
    counts = np.bincount(flat(ids(run)), minlength=SAMPLES)
    assert chi_squared(counts) < 47 + 5 * 94**0.5  # five standard deviations


@pytest.mark.parametrize("replacement", [True, False])
def test_a_weighted_sampler_gives_its_distribution(replacement: bool) -> None:
    weights = [0.0] * 24 + [1.0] * 24
    sampler = WeightedRandomSampler(weights, 16, replacement=replacement)
    order = sf.data.Weighted(weights, num_samples=16, replacement=replacement)

    steps = ids(build(loader(sampler=sampler), length="100 epochs"))

    assert len(steps) == 200  # an epoch has num_samples draws
    assert steps == ids(build(Rows(), batch_size=8, order=order, length="100 epochs"))
    counts = np.bincount(flat(steps), minlength=SAMPLES)
    assert not counts[:24].any()
    assert chi_squared(counts[24:]) < 23 + 5 * 46**0.5
    epochs = [flat(steps[start : start + 2]) for start in range(0, 200, 2)]
    repeats_none = all(len({*epoch}) == 16 for epoch in epochs)
    assert repeats_none is not replacement


@pytest.mark.parametrize("shuffle", [True, False])
def test_the_batch_size_of_one_rank_is_a_part_of_that_of_all(shuffle: bool) -> None:
    run = build(loader(sampler=DistributedSampler(Rows(), 2, 0, shuffle=shuffle)))

    assert run.parts.pipeline.sizes.batch_size == 16
    (of_size,) = [fact for fact in about(run).split("; ") if "batch_size" in fact]
    assert numbers_in(of_size) == [16, 8, 2]  # of all, of each replica, their number


def test_the_shuffled_loader_of_one_rank_gives_the_batch_of_all() -> None:
    run = build(loader(sampler=DistributedSampler(Rows(), 2, 0, shuffle=True)))

    assert ids(run) == ids(build(Rows(), batch_size=16))


def test_the_loader_in_order_of_one_rank_gives_the_batch_of_all() -> None:
    samplers = [DistributedSampler(Rows(), 2, rank, shuffle=False) for rank in range(2)]
    of_ranks = [DataLoader(range(SAMPLES), 8, sampler=sampler) for sampler in samplers]  # type: ignore[arg-type]

    steps = ids(build(loader(sampler=samplers[0])))

    for step, of_first, of_second in zip(steps[:3], *of_ranks, strict=True):
        assert sorted(step) == sorted(of_first.tolist() + of_second.tolist())


def test_the_batches_of_an_unknown_sampler_are_the_steps() -> None:
    run = build(loader(sampler=Backwards(Rows()), drop_last=True, batch_size=9))

    backwards = [*range(SAMPLES - 1, -1, -1)]
    batches = [backwards[start : start + 9] for start in range(0, SAMPLES, 9)]
    assert ids(run) == batches * 2


def test_listed_batches_are_the_steps() -> None:
    run = build(loader(batch_sampler=[[1, 2, 3], [4, 5]]), micro_batch_size=2)

    assert ids(run) == [[1, 2, 3], [4, 5]] * 2
    assert run.parts.pipeline.sizes.batch_size == 4  # the largest batch, in micro-batches of 2
    assert torch.isfinite(train_weights(run)).all()


NAMED: dict[str, dict[str, Any]] = {
    "drop_last (no sample is dropped)": {"drop_last": True},
    "generator (seed= of the run)": {"generator": torch.Generator(), "shuffle": True},
    "worker_init_fn (each sample is seeded)": {"worker_init_fn": print},
    "timeout (a hanging worker is named, and the run waits)": {"timeout": 3, "num_workers": 1},
    "multiprocessing_context (fork on Linux)": {
        "multiprocessing_context": "fork",
        "num_workers": 1,
    },
    "prefetch_factor (2 micro-batches per worker)": {"prefetch_factor": 4, "num_workers": 1},
    "in_order=False (batches come in order)": {"in_order": False, "num_workers": 1},
    "pin_memory_device (device=)": {"pin_memory_device": "cuda"},
}


TAKEN = {
    "dataset",
    "batch_size",
    "shuffle",
    "sampler",
    "batch_sampler",
    "num_workers",
    "collate_fn",
    "pin_memory",
    "persistent_workers",
}


def about(run: sf.Run) -> str:
    """What a run says of the loader that its data come from."""
    return run.parts.pipeline.data.about


def test_every_argument_of_a_loader_is_taken_or_named_here_and_on_the_page() -> None:
    arguments = {*inspect.signature(DataLoader).parameters}
    page = (Path(__file__).parents[2] / "docs/guides/data.md").read_text()
    rows = page[page.index("## A DataLoader") : page.index("### Batches of a sampler")]

    named = {re.split("[= ]", text)[0] for text in NAMED}
    assert arguments == TAKEN | named, "one of a newer torch?"
    assert [name for name in arguments if not re.search(rf"`{name}\b", rows)] == []


@pytest.mark.parametrize("text", NAMED)
def test_what_is_not_taken_is_named(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    run = build(loader(**NAMED[text]), console=True, length="1 steps")

    with run:
        pass

    assert about(run).endswith(f"; not taken: {text}")
    printed = " ".join(capsys.readouterr().out.split())
    assert f"data from {about(run)}" in printed


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"drop_last": True}, "; not taken: drop_last (no sample is dropped)"),
        ({"seed": 3}, "; not taken: the sampler's seed (seed= of the run)"),
        ({"seed": 3, "shuffle": False}, "order: sequential, as its DistributedSampler"),
    ],
)
def test_what_a_distributed_sampler_says_of_drops_and_seeds_is_named(
    settings: dict[str, Any], text: str
) -> None:
    sampler = DistributedSampler(Rows(), num_replicas=1, rank=0, **settings)

    assert about(build(loader(sampler=sampler))).endswith(text)


def test_what_is_not_taken_from_the_loader_of_a_split_is_named() -> None:
    splits = {
        "val": sf.Split(loader(drop_last=True, worker_init_fn=print)),
        "test": sf.Split(loader(shuffle=True)),
    }

    split, not_taken = about(build(Rows(), batch_size=8, splits=splits)).split("; ")
    _, order, *of_split = about(build(loader(), splits=splits)).split("; ")

    assert split.endswith(" 'val'")
    assert re.findall(r"(\w+) \(", not_taken) == ["drop_last", "worker_init_fn"]
    assert order.endswith(" SequentialSampler")
    assert of_split == [split, not_taken]


def test_what_is_taken_or_changes_nothing_is_not_named() -> None:
    given = loader(
        num_workers=1, pin_memory=True, persistent_workers=True, prefetch_factor=2, collate_fn=twice
    )

    _, order = about(build(given)).split("; ")  # and nothing not taken

    assert order.startswith("order: sequential, ")
    assert order.endswith(" SequentialSampler")


def test_nothing_is_said_of_a_loader_where_there_is_none() -> None:
    assert about(build(Rows(), batch_size=8)) == ""


def plan_text(run: sf.Run) -> str:
    return "\n".join(map(str, sections(run.parts)))


def test_plan_names_the_order_of_a_loader_and_what_is_not_taken() -> None:
    text = plan_text(build(loader(shuffle=True, drop_last=True)))

    (line,) = lines_naming(text, "RandomSampler")
    _, order, not_taken = line.split("; ")
    assert order.endswith(" RandomSampler")
    assert not_taken.partition(": ")[2].split()[0] == "drop_last"


def test_plan_names_the_order_of_a_run() -> None:
    text = plan_text(build(Rows(), batch_size=8, order="lanes"))

    assert "6.00 steps, lanes; 12 steps" in text


SET_TWICE = "setting-also-of-loader"


@pytest.mark.parametrize(
    ("given", "setting", "value"),
    [
        (loader(), "batch_size", 4),
        (loader(), "workers", 2),
        (loader(), "collate_fn", twice),
        (loader(), "order", "lanes"),
        (loader(batch_sampler=[[1, 2], [3]]), "batch_size", 2),
        (loader(sampler=DistributedSampler(Rows(), 2, 0)), "batch_size", 8),
    ],
)
def test_a_setting_that_the_loader_has_otherwise_is_refused(
    given: DataLoader[Any], setting: str, value: Any
) -> None:
    with refused(SET_TWICE, setting=setting):
        build(given, **{setting: value})


@pytest.mark.parametrize(
    ("given", "code"),
    [
        (loader(batch_size=None), "loader-of-whole-batches"),
        (OwnBatches(Rows(), batch_size=8), "loader-with-own-iter"),
        (loader(sampler=RandomSampler(range(5))), "sampler-of-another-data-set"),  # type: ignore[arg-type]
        (loader(sampler=OwnGenerator(Rows())), "sampler-not-repeatable"),
        (loader(sampler=WeightedRandomSampler([1.0, 2.0], 8)), "weights-not-of-samples"),
    ],
)
def test_a_loader_that_cannot_be_taken_is_refused(given: DataLoader[Any], code: str) -> None:
    with refused(code):
        build(given)


def test_batches_of_many_sizes_are_not_compiled() -> None:
    with refused("compile-of-many-shapes"):
        build(loader(batch_sampler=[[1], [1, 2], [1, 2, 3]]), compile=True)


def test_a_loader_of_a_stream_is_its_stream() -> None:
    run = build(DataLoader(Stream(), batch_size=4), length="2 steps")

    assert isinstance(run.train_data.dataset, Stream)
    assert run.parts.pipeline.sizes.batch_size == 4
    assert run.parts.pipeline.plan.to_dict() == {"order": "arrival"}


@pytest.mark.parametrize(
    ("order", "code"),
    [
        ("random", "setting-out-of-range"),
        (np.ones(SAMPLES), "setting-out-of-range"),
        (3, "setting-out-of-range"),
        (sf.data.Weighted([1]), "weights-not-of-samples"),
    ],
)
def test_an_order_that_does_not_fit_is_refused(order: Any, code: str) -> None:
    with refused(code):
        build(Rows(), batch_size=8, order=order)


def test_a_tensor_is_no_order_beside_a_loader() -> None:
    with refused("setting-out-of-range"):
        build(loader(), order=torch.ones(SAMPLES))


def test_a_data_set_without_length_is_refused() -> None:
    with refused("data-set-without-length", sf.DataError):
        build(loader(NoLength(), sampler=Backwards(range(SAMPLES))))


def test_more_lanes_than_samples_are_refused() -> None:
    with refused("lanes-exceed-samples"):
        build(Rows(), batch_size=49, order="lanes")


def test_a_batch_size_is_needed_where_there_is_no_loader() -> None:
    with refused("batch-size-missing"):
        build(Rows(), batch_size=None)


def test_a_mixture_is_shuffled_only() -> None:
    with refused("order-only-shuffled"):
        build(sf.data.Mixture({"a": (Rows(), 1.0)}), batch_size=8, order="lanes")


def test_batches_in_tokens_are_shuffled_only() -> None:
    class Lengthy(Rows):
        lengths = np.arange(1, SAMPLES + 1)

    with refused("order-only-shuffled", setting="order", value="sequential"):
        build(Lengthy(), batch_size="64 tokens", order="sequential")


# --- splits ---------------------------------------------------------------------------------------


def confident(outputs: Tensor, _: Tensor) -> sf.Mean:
    return sf.Mean(outputs.amax(1).sum(), len(outputs))


def scored(split: sf.Split, **changes: Any) -> dict[str, float]:
    return build(Rows(), batch_size=8, splits={"val": split}, **changes).evaluate()


@pytest.mark.parametrize("shuffle", [False, True])
def test_a_split_of_a_loader_is_the_split_of_its_data_set(shuffle: bool) -> None:
    expected = scored(sf.Split(Rows(), metrics=confident, batch_size=5))
    split = sf.Split(
        loader(shuffle=shuffle, batch_size=5, drop_last=True, num_workers=1), metrics=confident
    )

    assert split.batch_size == 5
    assert split.workers == 1
    assert scored(split) == expected


@pytest.mark.parametrize("shuffle", [False, True])
def test_a_split_of_a_loader_is_evaluated_without_a_run_too(shuffle: bool) -> None:
    def evaluate(split: sf.Split) -> dict[str, float]:
        return sf.evaluate(model, split, loss=loss, device="cpu")

    model = nn.Linear(4, 3)
    expected = evaluate(sf.Split(Rows(), metrics=confident, batch_size=5))
    given = loader(shuffle=shuffle, batch_size=5, drop_last=True, num_workers=1)

    assert evaluate(sf.Split(given, metrics=confident)) == expected


def test_a_split_of_a_loader_has_the_collate_function_of_the_loader() -> None:
    plain = scored(sf.Split(Rows(), metrics=confident))

    split = sf.Split(loader(), metrics=confident)

    assert scored(split, collate_fn=twice) == plain


def test_a_split_without_a_collate_function_has_that_of_the_run() -> None:
    doubled = scored(sf.Split(loader(collate_fn=twice)))

    assert scored(sf.Split(Rows()), collate_fn=twice) == doubled


def test_only_a_split_with_workers_starts_them(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[int] = []
    init = Workers.__init__

    def note_and_init(self: Workers, *arguments: Any, workers: int, **keywords: Any) -> None:
        started.append(workers)
        init(self, *arguments, workers=workers, **keywords)

    monkeypatch.setattr(Workers, "__init__", note_and_init)

    without = scored(sf.Split(Rows(), metrics=confident))
    assert not started
    assert scored(sf.Split(Rows(), metrics=confident, workers=1)) == without
    assert started == [1]


def test_a_split_takes_the_part_that_its_sampler_reads() -> None:
    part = [1, 5, 7]
    expected = scored(sf.Split(Subset(Rows(), part)))

    assert scored(sf.Split(loader(sampler=SubsetRandomSampler(part)))) == expected


def test_a_split_takes_all_data_of_which_a_sampler_reads_the_share_of_a_rank() -> None:
    share = loader(sampler=DistributedSampler(Rows(), 4, 1))

    assert scored(sf.Split(share)) == scored(sf.Split(Rows()))


@pytest.mark.parametrize(
    ("given", "code"),
    [
        (
            loader(sampler=WeightedRandomSampler([1.0] * SAMPLES, 8)),
            "split-loader-not-each-once",
        ),
        (loader(batch_sampler=[[1, 1]]), "split-loader-not-each-once"),
        (OwnBatches(Rows()), "loader-with-own-iter"),
    ],
)
def test_a_split_of_a_loader_that_reads_otherwise_is_refused(
    given: DataLoader[Any], code: str
) -> None:
    with refused(code):
        sf.Split(given)


@pytest.mark.parametrize(
    "settings",
    [{"batch_size": 3}, {"workers": 3}, {"collate_fn": twice}],
    ids=["batch_size", "workers", "collate_fn"],
)
def test_a_setting_of_a_split_that_the_loader_has_otherwise_is_refused(
    settings: dict[str, Any],
) -> None:
    with refused(SET_TWICE):
        sf.Split(loader(), **settings)


@pytest.mark.parametrize(
    "given",
    [
        loader(sampler=WeightedRandomSampler([1.0] * SAMPLES, 8)),
        loader(sampler=RandomSampler(Rows(), num_samples=5), collate_fn=twice),
        loader(batch_sampler=[[1, 1]]),
        loader(Stream(), collate_fn=twice),
        loader(Stream(), batch_size=None),
    ],
)
def test_what_to_write_for_a_refused_split_can_be_typed_as_it_stands(
    given: DataLoader[Any],
) -> None:
    with pytest.raises(sf.ConfigError) as caught:
        sf.Split(given)
    (remedy,) = map(str, caught.value.remedies)

    typed = remedy[remedy.index("sf.Split(") :].split(", or")[0]
    split = eval(typed, {"sf": sf, "itertools": itertools, "loader": given})

    assert split.batch_size == given.batch_size
    assert (split.collate_fn is twice) == (given.collate_fn is twice)
    build(Rows(), batch_size=8, splits={"val": split})


# --- torchdata ------------------------------------------------------------------------------------


def of_torchdata(kind: type, name: str) -> type:
    return type(name, (kind,), {"__module__": "torchdata.stateful_dataloader.sampler"})


def test_torchdatas_own_samplers_are_known_by_their_names() -> None:
    rows = Rows()
    random_sampler = of_torchdata(RandomSampler, "RandomSampler")(rows)
    batch_sampler = of_torchdata(BatchSampler, "BatchSampler")(random_sampler, 8, drop_last=True)

    run = build(DataLoader(rows, batch_sampler=batch_sampler))

    assert ids(run) == ids(build(rows, batch_size=8))
    assert "drop_last" in about(run)


def test_torchdatas_sampler_for_ranks_is_known_by_its_name() -> None:
    rows = Rows()
    kind = of_torchdata(DistributedSampler, "StatefulDistributedSampler")
    share = kind(rows, 2, 0, shuffle=False)
    batch_sampler = of_torchdata(BatchSampler, "BatchSampler")(share, 4, drop_last=False)

    run = build(loader(batch_sampler=batch_sampler))

    assert ids(run) == ids(build(rows, batch_size=8, order="sequential"))


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
@pytest.mark.parametrize(("shuffle", "order"), [(True, "shuffled"), (False, "sequential")])
def test_a_stateful_loader_is_its_data_set(shuffle: bool, order: str) -> None:
    stateful = pytest.importorskip("torchdata.stateful_dataloader").StatefulDataLoader
    rows = Rows()

    run = build(stateful(rows, batch_size=8, shuffle=shuffle))

    assert ids(run) == ids(build(rows, batch_size=8, order=order))


# --- two ranks ------------------------------------------------------------------------------------


def ids_with_distributed_sampler(shuffle: bool, replicas: int) -> list[list[int]]:
    rank = int(os.environ.get("RANK", "0"))
    share = DistributedSampler(Rows(), replicas, rank=rank, shuffle=shuffle)
    given = loader(batch_size=8 // replicas, sampler=share)

    ids_of_steps = []
    with build(given, length="9 steps") as run:
        for step in run:
            ids_of_steps.append(flat([part.sample_ids.tolist() for part in step.micro_batches]))
    return ids_of_steps


@pytest.mark.parametrize("shuffle", [True, False])
def test_two_ranks_with_a_distributed_sampler_share_the_batches_of_one_process(
    shuffle: bool, ranks: Ranks
) -> None:
    alone = ids_with_distributed_sampler(shuffle=shuffle, replicas=1)

    first, second = ranks(2, ids_with_distributed_sampler, shuffle=shuffle, replicas=2)

    for of_first, of_second, of_both in zip(first, second, alone, strict=True):
        assert of_first + of_second == of_both
        assert len(of_first) == len(of_second) == 4
