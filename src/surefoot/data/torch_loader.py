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
class _LoaderOrder:
    """What the samplers of a loader say: which samples, in which order, how many in a step.
    `size_text` says where a size comes from that is not the loader's own.
    """

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
    is_iterable = isinstance(loader.dataset, IterableDataset)
    if is_iterable and loader.batch_size is None and loader.batch_sampler is None:
        # the loader itself is a stream of samples
        return TrainData(loader, order or "shuffled", batch_size, workers or 0, collate_fn)
    workers = _agreed("workers", workers, loader.num_workers, "num_workers")
    collate_fn = _collate(loader, collate_fn)
    _check_kind(loader, "train_data")
    # an iterable data set is the training data as if it had been passed itself
    if is_iterable:
        return TrainData(
            loader.dataset,
            order or "shuffled",
            _agreed("batch_size", batch_size, loader.batch_size, "batch_size"),
            workers,
            collate_fn,
            about=_untaken(loader).removeprefix("; "),
        )
    taken = _known_order(loader) or _listed_order(loader, seed)
    is_listed = isinstance(taken.order, BatchLists)
    if order is not None and order != taken.order:
        raise _refusal("order", order, f"has the order: {taken.text}")
    if batch_size is not None and (is_listed or batch_size != taken.batch_size):
        of_loader = f"has batch_size = {taken.batch_size}{taken.size_text}"
        raise _refusal("batch_size", batch_size, of_loader)
    about = f"a DataLoader; order: {taken.text}"
    if taken.size_text and not is_listed:
        about += f"; batch_size {taken.batch_size}{taken.size_text}"
    return TrainData(
        taken.dataset,
        taken.order,
        taken.batch_size,
        workers,
        collate_fn,
        about=about + _untaken(loader),
        loader=loader,
    )


def read_split_loader(
    loader: DataLoader[Any], batch_size: int | None, workers: int | None, collate_fn: Any
) -> dict[str, Any]:
    """Return the parts of a `Split` that its `DataLoader` sets. A split has every sample once."""
    arguments = ""  # for a split of the same data without the loader
    if loader.batch_size:
        arguments += f", batch_size={loader.batch_size}"
    if loader.collate_fn not in (default_collate, default_convert):
        arguments += ", collate_fn=loader.collate_fn"
    if isinstance(loader.dataset, IterableDataset):
        name = type(loader.dataset).__name__
        raise ConfigError(
            "split-loader-of-stream",
            problem=f"Split: data is a DataLoader of {name}, which can only be iterated",
            reason="a split has a number of rows, which are recorded when a run begins",
            remedy="say how many:"
            f" sf.Split(sf.data.Stream(loader.dataset, samples=1000){arguments})",
            setting="data",
            value=name,
        )
    _check_kind(loader, "Split(data)")
    taken = _known_order(loader)
    if taken is None or taken.order not in ("sequential", "shuffled"):
        batches: Any = loader.batch_sampler
        sampler = loader.sampler if _kind(batches) is BatchSampler else batches
        name = type(sampler).__name__
        raise ConfigError(
            "split-loader-not-each-once",
            problem=f"Split: data is a DataLoader with a {name}, which may read a sample twice or"
            " not at all",
            reason="a split evaluates every sample once, so its metrics do not depend on the order",
            remedy="give the data set, or a torch.utils.data.Subset:"
            f" sf.Split(loader.dataset{arguments})",
            sampler=name,
        )
    rank_size = loader.batch_sampler.batch_size  # type: ignore[union-attr]  # of one rank, as in a split
    return {
        "data": taken.dataset,
        "batch_size": _agreed("Split: batch_size", batch_size, rank_size, "batch_size"),
        "workers": _agreed("Split: workers", workers, loader.num_workers, "num_workers"),
        "collate_fn": _collate(loader, collate_fn, name="Split: collate_fn") or default_collate,
        "untaken": _untaken(loader),
    }


def _known_order(loader: DataLoader[Any]) -> _LoaderOrder | None:
    """Return the order of a sampler of torch, or None for a sampler of the user."""
    batches: Any = loader.batch_sampler
    dataset = loader.dataset
    if _kind(batches) is not BatchSampler:
        return None
    sampler: Any = batches.sampler
    size = batches.batch_size
    name = type(sampler).__name__
    kind = _kind(sampler)
    if kind is SequentialSampler:
        _check_source(sampler.data_source, dataset, name)
        return _LoaderOrder(dataset, "sequential", size, f"sequential, as its {name}")
    if kind is RandomSampler:
        samples = _check_source(sampler.data_source, dataset, name)
        if sampler.replacement:
            uniform = Weighted([1.0] * samples, num_samples=sampler.num_samples)
            text = f"random draws with replacement, not the indices of its {name}"
            return _LoaderOrder(dataset, uniform, size, text)
        text = f"{_PERMUTED} {name}"
        if sampler.num_samples == samples:
            return _LoaderOrder(dataset, "shuffled", size, text)
        text += f", {sampler.num_samples:,} samples per epoch"
        return _LoaderOrder(dataset, Shuffled(sampler.num_samples), size, text)
    if kind is WeightedRandomSampler:
        weighted = Weighted(
            sampler.weights.tolist(),
            num_samples=sampler.num_samples,
            replacement=sampler.replacement,
        )
        text = f"random draws with the weights of its {name}, not its indices"
        return _LoaderOrder(dataset, weighted, size, text)
    if kind is SubsetRandomSampler:
        subset = Subset(dataset, list(sampler.indices))
        text = f"surefoot's permutations of the {len(subset):,} samples of its {name}"
        return _LoaderOrder(subset, "shuffled", size, text)
    if kind is DistributedSampler:
        _check_source(sampler.dataset, dataset, name)
        copies = sampler.num_replicas
        size_text = f" ({size} for each of {copies} replicas)" if copies > 1 else ""
        order = "shuffled" if sampler.shuffle else "sequential"
        text = f"{_PERMUTED} {name}" if sampler.shuffle else f"sequential, as its {name}"
        return _LoaderOrder(dataset, order, size * copies, text, size_text)
    return None


def _listed_order(loader: DataLoader[Any], seed: int) -> _LoaderOrder:
    batches = _batches(loader)
    lists = BatchLists(
        seed,
        batches,
        samples=count_samples(loader.dataset),
        has_torch_batches=_kind(batches) is BatchSampler,
    )
    text = f"the {lists.steps:,} batches per epoch of its {lists.name}"
    size_text = f", the largest batch of its {lists.name}"
    return _LoaderOrder(loader.dataset, lists, lists.largest, text, size_text)


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
    of_loader = loader.collate_fn
    if collate_fn is not None and collate_fn is not of_loader:
        other = f"has collate_fn = {_name_of(of_loader)}"
        raise _refusal(name, _name_of(collate_fn), other, format_fn=str)
    return None if of_loader is default_collate else of_loader


def _agreed(name: str, setting: Any, of_loader: Any, keyword: str) -> Any:
    if setting is not None and setting != of_loader:
        raise _refusal(name, setting, f"has {keyword} = {of_loader}")
    return of_loader


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


def _name_of(function: Any) -> str:
    return str(getattr(function, "__name__", type(function).__name__))


def _untaken(loader: DataLoader[Any]) -> str:
    """Return what the run does not take from a loader, each with what stands in its place, or
    "".
    """
    batches: Any = loader.batch_sampler
    sampler = None
    drops_last = False
    if _kind(batches) is BatchSampler:
        sampler = batches.sampler
        drops_last = batches.drop_last
    has_generator = loader.generator is not None
    if isinstance(sampler, RandomSampler | SubsetRandomSampler | WeightedRandomSampler):
        has_generator = has_generator or sampler.generator is not None
    has_seed = False
    if isinstance(sampler, DistributedSampler):
        drops_last = drops_last or sampler.drop_last
        has_seed = sampler.shuffle and sampler.seed != 0
    prefetches_otherwise = loader.prefetch_factor not in (None, _PREFETCHED)
    reasons = {
        "drop_last (no sample is dropped)": drops_last,
        "generator (seed= of the run)": has_generator,
        "the sampler's seed (seed= of the run)": has_seed,
        "worker_init_fn (each sample is seeded)": loader.worker_init_fn is not None,
        "timeout (a hanging worker is named, and the run waits)": loader.timeout > 0,
        "multiprocessing_context (fork on Linux)": loader.multiprocessing_context is not None,
        f"prefetch_factor ({_PREFETCHED} micro-batches per worker)": prefetches_otherwise,
        "in_order=False (batches come in order)": not loader.in_order,
        "pin_memory_device (device=)": bool(loader.pin_memory_device),
    }
    untaken = [text for text, is_set in reasons.items() if is_set]
    if not untaken:
        return ""
    return f"; not taken: {', '.join(untaken)}"
