"""The parts of a `torch.utils.data.DataLoader` that a run takes: its data set, order, batch size,
collate function and workers.
"""

from dataclasses import dataclass
from typing import Any

from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    WeightedRandomSampler,
    default_collate,
    default_convert,
)
from torch.utils.data.distributed import DistributedSampler

from surefoot.config.order import Order, Weighted
from surefoot.data.batch_lists import BatchLists
from surefoot.data.dataset_checks import count_samples
from surefoot.data.orders import Shuffled
from surefoot.data.pipeline import TrainData
from surefoot.errors import ConfigError, Setting

_PREFETCHED = 2  # micro-batches by each worker, as torch's default
_OF_TORCHDATA = {
    "BatchSampler": BatchSampler,
    "RandomSampler": RandomSampler,
    "StatefulDistributedSampler": DistributedSampler,
}
_PERMUTED = "surefoot's permutation of each epoch, not that of its"


@dataclass(frozen=True)
class _Order:
    dataset: Any
    order: Any
    batch_size: int
    text: str
    size_text: str = ""


def read_loader(
    loader: DataLoader[Any],
    *,
    seed: int,
    batch_size: int | str | None,
    order: Order | None,
    workers: int | None,
    collate_fn: Any,
) -> TrainData:
    """Return the training data that a `DataLoader` describes, and one line on what was taken and
    what was not.

    The other arguments are the settings of `Run`. Raises `ConfigError` if the loader says
    otherwise, or cannot be addressed by step.
    """
    if (
        isinstance(loader.dataset, IterableDataset)
        and loader.batch_size is None
        and loader.batch_sampler is None
    ):
        return TrainData(
            loader, order or "shuffled", batch_size, workers or 0, collate_fn
        )  # a stream of samples
    workers = _either("workers", workers, loader.num_workers, "num_workers")
    collate_fn = _collate(loader, collate_fn)
    _check_kind(loader, "train_data")
    # an iterable data set is the training data as if it had been passed itself
    if isinstance(loader.dataset, IterableDataset):
        size = _either("batch_size", batch_size, loader.batch_size, "batch_size")
        return TrainData(
            loader.dataset, order or "shuffled", size, workers, collate_fn, _untaken(loader)[2:]
        )
    known = _known_order(loader)
    if known is None:
        lists = BatchLists(seed, _batches(loader), samples=count_samples(loader.dataset))
        text = f"the {lists.steps:,} batches per epoch of its {lists.name}"
        known = _Order(
            loader.dataset, lists, lists.largest, text, f", the largest batch of its {lists.name}"
        )
    if order is not None and order != known.order:
        raise _refusal("order", order, f"has the order: {known.text}")
    if batch_size is not None and (
        batch_size != known.batch_size or isinstance(known.order, BatchLists)
    ):
        raise _refusal(
            "batch_size", batch_size, f"has batch_size = {known.batch_size}{known.size_text}"
        )
    taken = f"a DataLoader; order: {known.text}"
    if known.size_text and not isinstance(known.order, BatchLists):
        taken += f"; batch_size {known.batch_size}{known.size_text}"
    return TrainData(
        known.dataset,
        known.order,
        known.batch_size,
        workers,
        collate_fn,
        taken + _untaken(loader),
        loader,
    )


def read_split_loader(
    loader: DataLoader[Any], batch_size: int | None, workers: int | None, collate_fn: Any
) -> dict[str, Any]:
    """Return the parts of a `Split` that its `DataLoader` sets. A split has every sample once."""
    own = f", batch_size={loader.batch_size}" if loader.batch_size else ""
    own += (
        ""
        if loader.collate_fn in (default_collate, default_convert)
        else ", collate_fn=loader.collate_fn"
    )
    if isinstance(loader.dataset, IterableDataset):
        name = type(loader.dataset).__name__
        raise ConfigError(
            "split-loader-of-stream",
            problem=f"Split: data is a DataLoader of {name}, which can only be iterated",
            reason="a split has a number of rows, which are recorded when a run begins",
            remedy=f"say how many: sf.Split(sf.data.Stream(loader.dataset, samples=1000){own})",
            setting="data",
            value=name,
        )
    _check_kind(loader, "Split(data)")
    known = _known_order(loader)
    if known is None or known.order not in ("sequential", "shuffled"):
        sampler = type(
            loader.sampler if _kind(loader.batch_sampler) is BatchSampler else loader.batch_sampler
        ).__name__
        raise ConfigError(
            "split-loader-not-each-once",
            problem=f"Split: data is a DataLoader with a {sampler}, which may read a sample twice or"
            " not at all",
            reason="a split evaluates every sample once, so its metrics do not depend on the order",
            remedy="give the data set, or a torch.utils.data.Subset:"
            f" sf.Split(loader.dataset{own})",
            sampler=sampler,
        )
    own_size = loader.batch_sampler.batch_size  # type: ignore[union-attr]  # of one rank, as in a split
    return {
        "data": known.dataset,
        "batch_size": _either("Split: batch_size", batch_size, own_size, "batch_size"),
        "workers": _either("Split: workers", workers, loader.num_workers, "num_workers"),
        "collate_fn": _collate(loader, collate_fn, name="Split: collate_fn") or default_collate,
        "untaken": _untaken(loader),
    }


def _known_order(loader: DataLoader[Any]) -> _Order | None:
    batches: Any = loader.batch_sampler
    dataset = loader.dataset
    if _kind(batches) is not BatchSampler:
        return None
    sampler: Any = batches.sampler
    size, kind, known = batches.batch_size, type(sampler).__name__, _kind(sampler)
    if known is SequentialSampler:
        _check_source(sampler.data_source, dataset, kind)
        return _Order(dataset, "sequential", size, f"sequential, as its {kind}")
    if known is RandomSampler:
        samples = _check_source(sampler.data_source, dataset, kind)
        if sampler.replacement:
            uniform = Weighted([1.0] * samples, num_samples=sampler.num_samples)
            return _Order(
                dataset,
                uniform,
                size,
                f"random draws with replacement, not the indices of its {kind}",
            )
        shuffled: Any = (
            "shuffled" if sampler.num_samples == samples else Shuffled(sampler.num_samples)
        )
        limit = "" if shuffled == "shuffled" else f", {sampler.num_samples:,} samples per epoch"
        return _Order(dataset, shuffled, size, f"{_PERMUTED} {kind}{limit}")
    if known is WeightedRandomSampler:
        weights = sampler.weights.tolist()
        weighted = Weighted(
            weights, num_samples=sampler.num_samples, replacement=sampler.replacement
        )
        return _Order(
            dataset, weighted, size, f"random draws with the weights of its {kind}, not its indices"
        )
    if known is SubsetRandomSampler:
        subset = Subset(dataset, list(sampler.indices))
        return _Order(
            subset,
            "shuffled",
            size,
            f"surefoot's permutations of the {len(subset):,} samples of its {kind}",
        )
    if known is DistributedSampler:
        _check_source(sampler.dataset, dataset, kind)
        copies = sampler.num_replicas
        text = f"{_PERMUTED} {kind}" if sampler.shuffle else f"sequential, as its {kind}"
        shared = f" ({size} for each of {copies} replicas)" if copies > 1 else ""
        return _Order(
            dataset, "shuffled" if sampler.shuffle else "sequential", size * copies, text, shared
        )
    return None


def _kind(sampler: Any) -> Any:
    """Return the class of a sampler; torch's for one of torchdata, which adds a position within the
    epoch to the sampler of the same name.
    """
    kind = type(sampler)
    is_of_torchdata = kind.__module__.startswith("torchdata.")
    return _OF_TORCHDATA.get(kind.__name__, kind) if is_of_torchdata else kind


def _batches(loader: DataLoader[Any]) -> Any:
    batches: Any = loader.batch_sampler
    if _kind(batches) is BatchSampler and batches.drop_last:
        return BatchSampler(batches.sampler, batches.batch_size, drop_last=False)
    return batches


def _check_kind(loader: DataLoader[Any], where: str) -> None:
    kind = type(loader)
    is_stateful = kind.__module__.startswith("torchdata.")  # its own iterator only counts batches
    if kind.__iter__ is not DataLoader.__iter__ and not is_stateful:
        raise ConfigError(
            "loader-with-own-iter",
            problem=f"{where} is a {kind.__name__}, a DataLoader with its own __iter__, which"
            " surefoot would not call",
            reason="its batches may differ from those of its data set",
            remedy="give the data set, loader.dataset, and do the rest in collate_fn or in the loss",
            setting=where,
            kind=kind.__name__,
        )
    if loader.batch_sampler is None:
        raise ConfigError(
            "loader-of-whole-batches",
            problem=f"{where} is a DataLoader with batch_size=None, so its data set returns whole"
            " batches",
            reason="surefoot numbers samples, to give each step its batch and each sample its"
            " augmentation",
            remedy="let __getitem__ return one sample, and give the DataLoader a batch_size",
            setting=where,
        )


def _check_source(source: Any, dataset: Any, kind: str) -> int:
    if len(source) != len(dataset):
        raise ConfigError(
            "sampler-of-another-data-set",
            problem=f"the DataLoader's {kind} numbers {len(source)} samples, and its data set has"
            f" {len(dataset)}",
            remedy="build the sampler for this data set, or give a torch.utils.data.Subset",
            sampler=kind,
            numbered=len(source),
            samples=len(dataset),
        )
    return len(source)


def _collate(loader: DataLoader[Any], collate_fn: Any, *, name: str = "collate_fn") -> Any:
    own = loader.collate_fn
    if collate_fn is not None and collate_fn is not own:
        raise _refusal(name, _called(collate_fn), f"has collate_fn = {_called(own)}", format_fn=str)
    return None if own is default_collate else own


def _either(name: str, setting: Any, own: Any, keyword: str) -> Any:
    if setting is not None and setting != own:
        raise _refusal(name, setting, f"has {keyword} = {own}")
    return own


def _refusal(name: str, setting: Any, other: str, *, format_fn: Any = repr) -> ConfigError:
    keyword = name.rpartition(" ")[2]
    return ConfigError(
        "setting-also-of-loader",
        problem=f"{name} = {format_fn(setting)}, but the DataLoader {other}",
        reason="both would decide the same, and neither is ignored silently",
        remedy=[("leave out", Setting(keyword)), "give the data set: loader.dataset"],
        setting=keyword,
        value=setting,
    )


def _called(function: Any) -> str:
    return str(getattr(function, "__name__", type(function).__name__))


def _untaken(loader: DataLoader[Any]) -> str:
    batches: Any = loader.batch_sampler
    sampler = batches.sampler if _kind(batches) is BatchSampler else None
    draws = (
        isinstance(sampler, RandomSampler | SubsetRandomSampler | WeightedRandomSampler)
        and sampler.generator
    )
    share: Any = sampler if isinstance(sampler, DistributedSampler) else None
    drops = [
        each.drop_last
        for each in (batches, share)
        if isinstance(each, BatchSampler | DistributedSampler)
    ]
    reasons = {
        "drop_last (no sample is dropped)": _kind(batches) is BatchSampler and any(drops),
        "generator (seed= of the run)": bool(loader.generator or draws),
        "the sampler's seed (seed= of the run)": share is not None
        and share.shuffle
        and share.seed != 0,
        "worker_init_fn (each sample is seeded)": loader.worker_init_fn is not None,
        "timeout (a hanging worker is named, and the run waits)": loader.timeout > 0,
        "multiprocessing_context (fork on Linux)": loader.multiprocessing_context is not None,
        f"prefetch_factor ({_PREFETCHED} micro-batches per worker)": loader.prefetch_factor
        not in (None, _PREFETCHED),
        "in_order=False (batches come in order)": not loader.in_order,
        "pin_memory_device (device=)": bool(loader.pin_memory_device),
    }
    untaken = [text for text, is_set in reasons.items() if is_set]
    return f"; not taken: {', '.join(untaken)}" if untaken else ""
