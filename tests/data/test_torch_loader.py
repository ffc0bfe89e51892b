"""A `DataLoader` as training data or in a split: what is taken, what is named, and what is
refused.
"""

from __future__ import annotations

import inspect
import itertools
import os
import re
from collections.abc import Callable, Iterator
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
    size = {} if "batch_sampler" in settings else {"batch_size": 8}
    return DataLoader(Rows() if data is None else data, **size | settings)  # type: ignore[arg-type]


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
    return [
        np.concatenate([ids for ids, _ in plan.micro_batches(step)]).tolist()
        for step in range(run.parts.length.steps)
    ]


def weights(run: sf.Run) -> Tensor:
    run.train()
    return torch.cat([each.detach().flatten() for each in run.state.model.parameters()])


def flat(batches: list[list[int]]) -> list[int]:
    return [sample for batch in batches for sample in batch]


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
    expected = torch.cat([each.detach().flatten() for each in model.parameters()])
    assert torch.equal(weights(run), expected)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_is_the_same_run_as_its_settings(workers: int) -> None:
    given = loader(shuffle=True, collate_fn=twice, num_workers=workers)
    settings: dict[str, Any] = {"batch_size": 8, "collate_fn": twice}
    assert build(given).parts.pipeline.workers == workers
    assert torch.equal(weights(build(given)), weights(build(Rows(), **settings)))
    agreeing = settings | {"workers": workers, "order": "shuffled"}
    assert ids(build(given, **agreeing)) == ids(build(Rows(), **settings))


def test_rows_of_tensors_are_gathered_and_not_read_one_by_one() -> None:
    run = build(loader(TensorDataset(X, Y), shuffle=True))
    assert run.parts.pipeline.feed(workers=0).gather is not None
    assert torch.equal(weights(run), weights(build((X, Y), batch_size=8)))


def test_rows_of_tensors_are_gathered_in_a_split_too(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = scored(sf.Split((X, Y), metrics=confident))

    def refuse(*_: Any) -> Any:
        raise AssertionError("read one by one")

    split = sf.Split(loader(TensorDataset(X, Y)), metrics=confident)
    monkeypatch.setattr(TensorDataset, "__getitem__", refuse)
    assert scored(split) == expected


def test_every_sampler_is_an_addressed_order() -> None:
    shuffled = ids(build(Rows(), batch_size=8))
    assert ids(build(loader())) == ids(build(Rows(), batch_size=8, order="sequential"))
    assert ids(build(loader(sampler=RandomSampler(Rows())))) == shuffled
    assert (
        ids(build(loader(batch_sampler=BatchSampler(RandomSampler(Rows()), 8, drop_last=False))))
        == shuffled
    )
    part = [3, 7, 40, 41, 2, 9, 10, 11]
    of_part = build(loader(sampler=SubsetRandomSampler(part)))
    assert sorted(ids(of_part)[0]) == [*range(8)]
    assert sorted(of_part.parts.pipeline.dataset.indices) == sorted(part)
    some = ids(build(loader(sampler=RandomSampler(Rows(), num_samples=16))))
    assert [len({*flat(some[start : start + 2])}) for start in (0, 2)] == [16, 16]
    with_replacement = build(
        loader(sampler=RandomSampler(Rows(), replacement=True, num_samples=4000))
    )
    assert with_replacement.parts.pipeline.plan.samples == 4000
    counts = np.bincount(flat(ids(with_replacement)), minlength=SAMPLES)
    expected = counts.sum() / SAMPLES
    assert (
        (counts - expected) ** 2 / expected
    ).sum() < 47 + 5 * 94**0.5  # five standard deviations


@pytest.mark.parametrize("replacement", [True, False])
def test_a_weighted_sampler_gives_its_distribution(replacement: bool) -> None:
    weight = [0.0] * 24 + [1.0] * 24
    sampler = WeightedRandomSampler(weight, 16, replacement=replacement)
    steps = ids(build(loader(sampler=sampler), length="100 epochs"))
    assert len(steps) == 200  # an epoch has num_samples draws
    order = sf.data.Weighted(weight, num_samples=16, replacement=replacement)
    assert steps == ids(build(Rows(), batch_size=8, order=order, length="100 epochs"))
    counts = np.bincount(flat(steps), minlength=SAMPLES)
    assert not counts[:24].any()
    assert ((counts[24:] - 1600 / 24) ** 2 / (1600 / 24)).sum() < 23 + 5 * 46**0.5
    epochs = [flat(steps[start : start + 2]) for start in range(0, 200, 2)]
    assert all(len({*epoch}) == 16 for epoch in epochs) is not replacement


@pytest.mark.parametrize("shuffle", [True, False])
def test_the_loader_of_one_rank_gives_the_batch_of_all(shuffle: bool) -> None:
    samplers = [DistributedSampler(Rows(), 2, rank, shuffle=shuffle) for rank in range(2)]
    run = build(loader(sampler=samplers[0]))
    assert run.parts.pipeline.sizes.batch_size == 16
    (of_size,) = [
        fact for fact in run.parts.pipeline.data.about.split("; ") if "batch_size" in fact
    ]
    assert numbers_in(of_size) == [16, 8, 2]  # of all, of each replica, their number
    if shuffle:
        assert ids(run) == ids(build(Rows(), batch_size=16))
    else:
        of_ranks = [
            [batch.tolist() for batch in DataLoader(range(SAMPLES), 8, sampler=each)]
            for each in samplers
        ]  # type: ignore[arg-type]
        assert [sorted(batch) for batch in ids(run)[:3]] == [
            sorted(a + b) for a, b in zip(*of_ranks, strict=True)
        ]


def test_the_batches_of_an_unknown_sampler_are_the_steps() -> None:
    run = build(loader(sampler=Backwards(Rows()), drop_last=True, batch_size=9))
    batches = [[*reversed(range(max(0, stop - 9), stop))] for stop in range(SAMPLES, 0, -9)]
    assert ids(run) == batches * 2
    listed = build(loader(batch_sampler=[[1, 2, 3], [4, 5]]), micro_batch_size=2)
    assert ids(listed) == [[1, 2, 3], [4, 5]] * 2
    assert listed.parts.pipeline.sizes.batch_size == 4  # the largest batch, in micro-batches of 2
    assert torch.isfinite(weights(listed)).all()


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
    *("dataset", "batch_size", "shuffle", "sampler", "batch_sampler", "num_workers", "collate_fn"),
    *("pin_memory", "persistent_workers"),
}


def test_every_argument_of_a_loader_is_taken_or_named_here_and_on_the_page() -> None:
    arguments = {*inspect.signature(DataLoader).parameters}
    assert arguments == TAKEN | {text.split("=")[0].split(" ")[0] for text in NAMED}, (
        "one of a newer torch?"
    )
    page = (Path(__file__).parents[2] / "docs/guides/data.md").read_text()
    rows = page[page.index("## A DataLoader") : page.index("### Batches of a sampler")]
    assert [name for name in arguments if not re.search(rf"`{name}\b", rows)] == []


@pytest.mark.parametrize("text", NAMED)
def test_what_is_not_taken_is_named(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    about = build(loader(**NAMED[text])).parts.pipeline.data.about
    assert about.endswith(f"; not taken: {text}")
    with build(loader(**NAMED[text]), console=True, length="1 steps"):
        pass
    shown = " ".join(capsys.readouterr().out.split())
    assert f"data from {about}" in shown


def test_what_a_distributed_sampler_says_of_drops_and_seeds_is_named() -> None:
    given = {"num_replicas": 1, "rank": 0}
    for settings, text in (
        ({"drop_last": True}, "; not taken: drop_last (no sample is dropped)"),
        ({"seed": 3}, "; not taken: the sampler's seed (seed= of the run)"),
        ({"seed": 3, "shuffle": False}, "order: sequential, as its DistributedSampler"),
    ):
        run = build(loader(sampler=DistributedSampler(Rows(), **given, **settings)))  # type: ignore[arg-type]
        assert run.parts.pipeline.data.about.endswith(text)


def test_what_is_not_taken_from_the_loader_of_a_split_is_named() -> None:
    splits = {
        "val": sf.Split(loader(drop_last=True, worker_init_fn=print)),
        "test": sf.Split(loader(shuffle=True)),
    }
    own = build(Rows(), batch_size=8, splits=splits).parts.pipeline.data.about
    split, untaken = own.split("; ")
    assert split.endswith(" 'val'")
    assert re.findall(r"(\w+) \(", untaken) == ["drop_last", "worker_init_fn"]
    about = build(loader(), splits=splits).parts.pipeline.data.about
    _, order, *of_split = about.split("; ")
    assert order.endswith(" SequentialSampler")
    assert of_split == [split, untaken]


def test_what_is_taken_or_changes_nothing_is_not_named() -> None:
    given = loader(
        num_workers=1, pin_memory=True, persistent_workers=True, prefetch_factor=2, collate_fn=twice
    )
    _, order = build(given).parts.pipeline.data.about.split("; ")  # and nothing not taken
    assert order.startswith("order: sequential, ")
    assert order.endswith(" SequentialSampler")
    assert build(Rows(), batch_size=8).parts.pipeline.data.about == ""


def test_plan_names_the_order_and_what_is_not_taken() -> None:
    from surefoot.tools.plan.summary import sections

    text = "\n".join(map(str, sections(build(loader(shuffle=True, drop_last=True)).parts)))
    (about,) = lines_naming(text, "RandomSampler")
    _, order, untaken = about.split("; ")
    assert order.endswith(" RandomSampler")
    assert untaken.partition(": ")[2].split()[0] == "drop_last"
    assert "6.00 steps, lanes; 12 steps" in "\n".join(
        map(str, sections(build(Rows(), batch_size=8, order="lanes").parts))
    )


SET_TWICE = "setting-also-of-loader"
REFUSED: dict[str, tuple[Callable[[], Any], dict[str, Any], str]] = {
    "batch_size": (loader, {"batch_size": 4}, SET_TWICE),
    "workers": (loader, {"workers": 2}, SET_TWICE),
    "collate_fn": (loader, {"collate_fn": twice}, SET_TWICE),
    "order": (loader, {"order": "lanes"}, SET_TWICE),
    "batch_size of batches": (
        lambda: loader(batch_sampler=[[1, 2], [3]]),
        {"batch_size": 2},
        SET_TWICE,
    ),
    "batch_size of replicas": (
        lambda: loader(sampler=DistributedSampler(Rows(), 2, 0)),
        {"batch_size": 8},
        SET_TWICE,
    ),
    "no batches": (lambda: loader(batch_size=None), {}, "loader-of-whole-batches"),
    "its own batches": (
        lambda: OwnBatches(Rows(), batch_size=8),
        {},
        "loader-with-own-iter",
    ),
    "another data set": (
        lambda: loader(sampler=RandomSampler(range(5))),  # type: ignore[arg-type]
        {},
        "sampler-of-another-data-set",
    ),
    "its own generator": (
        lambda: loader(sampler=OwnGenerator(Rows())),
        {},
        "sampler-not-repeatable",
    ),
    "too few weights": (
        lambda: loader(sampler=WeightedRandomSampler([1.0, 2.0], 8)),
        {},
        "weights-not-of-samples",
    ),
    "compiled lists": (
        lambda: loader(batch_sampler=[[1], [1, 2], [1, 2, 3]]),
        {"compile": True},
        "compile-of-many-shapes",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_loader_that_cannot_be_taken_is_refused(name: str) -> None:
    make, changes, code = REFUSED[name]
    fields = {"setting": name.split(maxsplit=1)[0]} if code == SET_TWICE else {}
    with refused(code, **fields):
        build(make(), **changes)


def test_a_loader_of_a_stream_is_its_stream() -> None:
    run = build(DataLoader(Stream(), batch_size=4), length="2 steps")
    assert isinstance(run.train_data.dataset, Stream)
    assert (run.parts.pipeline.sizes.batch_size, run.parts.pipeline.plan.to_dict()) == (
        4,
        {"order": "arrival"},
    )


ORDERS: list[tuple[Any, dict[str, Any], type[sf.SurefootError], str]] = [
    (
        Rows(),
        {"order": "random"},
        sf.ConfigError,
        "setting-out-of-range",
    ),
    (
        Rows(),
        {"order": np.ones(SAMPLES)},
        sf.ConfigError,
        "setting-out-of-range",
    ),
    (
        loader(),
        {"order": torch.ones(SAMPLES), "batch_size": None},
        sf.ConfigError,
        "setting-out-of-range",
    ),
    (
        loader(NoLength(), sampler=Backwards(range(SAMPLES))),
        {"batch_size": None},
        sf.DataError,
        "[data-set-without-length]",
    ),
    (Rows(), {"order": 3}, sf.ConfigError, "setting-out-of-range"),
    (
        Rows(),
        {"order": "lanes", "batch_size": 49},
        sf.ConfigError,
        "[lanes-exceed-samples]",
    ),
    (
        Rows(),
        {"order": sf.data.Weighted([1])},
        sf.ConfigError,
        "[weights-not-of-samples]",
    ),
    (
        Rows(),
        {"batch_size": None},
        sf.ConfigError,
        "batch-size-missing",
    ),
    (
        sf.data.Mixture({"a": (Rows(), 1.0)}),
        {"order": "lanes"},
        sf.ConfigError,
        "[order-only-shuffled]",
    ),
]


@pytest.mark.parametrize(("data", "changes", "kind", "text"), ORDERS)
def test_an_order_that_does_not_fit_is_refused(
    data: Any, changes: dict[str, Any], kind: type[sf.SurefootError], text: str
) -> None:
    with pytest.raises(kind) as caught:
        build(data, **{"batch_size": 8} | changes)
    assert text in str(caught.value)


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
    assert (split.batch_size, split.workers) == (5, 1)
    assert scored(split) == expected
    model = build(Rows(), batch_size=8).state.model
    assert sf.evaluate(model, split, loss=loss, device="cpu") == sf.evaluate(
        model, sf.Split(Rows(), metrics=confident, batch_size=5), loss=loss, device="cpu"
    )


def test_a_split_has_its_own_collate_function_and_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[int] = []
    init = Workers.__init__

    def counted(self: Workers, *arguments: Any, workers: int, **named: Any) -> None:
        started.append(workers)
        init(self, *arguments, workers=workers, **named)

    monkeypatch.setattr(Workers, "__init__", counted)
    plain = scored(sf.Split(Rows(), metrics=confident))
    doubled = scored(sf.Split(loader(collate_fn=twice)))
    assert (
        scored(sf.Split(loader(), metrics=confident), collate_fn=twice) == plain
    )  # its own default_collate
    assert scored(sf.Split(Rows()), collate_fn=twice) == doubled  # without its own: the run's
    assert not started
    assert scored(sf.Split(Rows(), metrics=confident, workers=1)) == plain
    assert started == [1]


def test_a_split_takes_the_part_and_the_data_that_its_sampler_reads() -> None:
    part = [1, 5, 7]
    assert scored(sf.Split(loader(sampler=SubsetRandomSampler(part)))) == scored(
        sf.Split(Subset(Rows(), part))
    )
    of_ranks = loader(sampler=DistributedSampler(Rows(), 4, 1))
    assert scored(sf.Split(of_ranks)) == scored(sf.Split(Rows()))


@pytest.mark.parametrize(
    ("data", "changes", "code"),
    [
        (
            lambda: loader(sampler=WeightedRandomSampler([1.0] * SAMPLES, 8)),
            {},
            "split-loader-not-each-once",
        ),
        (lambda: loader(batch_sampler=[[1, 1]]), {}, "split-loader-not-each-once"),
        (loader, {"batch_size": 3}, SET_TWICE),
        (loader, {"workers": 3}, SET_TWICE),
        (loader, {"collate_fn": twice}, SET_TWICE),
        (lambda: OwnBatches(Rows()), {}, "loader-with-own-iter"),
    ],
)
def test_a_split_of_a_loader_that_reads_otherwise_is_refused(
    data: Any, changes: dict[str, Any], code: str
) -> None:
    with refused(code):
        sf.Split(data(), **changes)


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
    (cure,) = map(str, caught.value.remedies)
    typed = cure[cure.index("sf.Split(") :].split(", or")[0]
    split = eval(typed, {"sf": sf, "itertools": itertools, "loader": given})
    assert split.batch_size == given.batch_size
    assert (split.collate_fn is twice) == (given.collate_fn is twice)
    build(Rows(), batch_size=8, splits={"val": split})


# --- torchdata ------------------------------------------------------------------------------------


def of_torchdata(kind: type, name: str) -> type:
    return type(name, (kind,), {"__module__": "torchdata.stateful_dataloader.sampler"})


def test_torchdatas_own_samplers_are_known_by_their_names() -> None:
    shuffled = of_torchdata(RandomSampler, "RandomSampler")
    batches = of_torchdata(BatchSampler, "BatchSampler")
    rows = Rows()
    given = DataLoader(rows, batch_sampler=batches(shuffled(rows), 8, drop_last=True))  # type: ignore[arg-type]
    run = build(given)
    assert ids(run) == ids(build(rows, batch_size=8))
    assert "drop_last" in run.parts.pipeline.data.about
    share = of_torchdata(DistributedSampler, "StatefulDistributedSampler")(
        rows, 2, 0, shuffle=False
    )
    run = build(loader(batch_sampler=batches(share, 4, drop_last=False)))
    assert ids(run) == ids(build(rows, batch_size=8, order="sequential"))


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
def test_a_stateful_loader_is_its_data_set() -> None:
    stateful = pytest.importorskip("torchdata.stateful_dataloader").StatefulDataLoader
    rows = Rows()
    for shuffle, order in ((True, "shuffled"), (False, "sequential")):
        run = build(stateful(rows, batch_size=8, shuffle=shuffle))
        assert ids(run) == ids(build(rows, batch_size=8, order=order))


# --- two ranks ------------------------------------------------------------------------------------


def ids_with_distributed_sampler(shuffle: bool, replicas: int) -> list[list[int]]:
    rows = Rows()
    share = DistributedSampler(
        rows, replicas, rank=int(os.environ.get("RANK", "0")), shuffle=shuffle
    )
    run = sf.Run(
        model=lambda: nn.Linear(4, 3),
        loss=lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]),
        train_data=DataLoader(rows, batch_size=8 // replicas, sampler=share),
        optimizer=sf.optim.sgd(lr=0.1),
        length="9 steps",
        console=False,
    )
    with run:
        return [
            [int(each) for part in step.micro_batches for each in part.sample_ids] for step in run
        ]


@pytest.mark.parametrize("shuffle", [True, False])
def test_two_ranks_with_a_distributed_sampler_share_the_batches_of_one_process(
    shuffle: bool, ranks: Ranks
) -> None:
    first, second = ranks(2, ids_with_distributed_sampler, shuffle=shuffle, replicas=2)
    alone = ids_with_distributed_sampler(shuffle=shuffle, replicas=1)
    assert [one + other for one, other in zip(first, second, strict=True)] == alone
    assert all(len(one) == len(other) == 4 for one, other in zip(first, second, strict=True))
