"""Global batch sizes and micro-batch sizes, in samples or in tokens including padding."""

import re
from dataclasses import dataclass
from typing import Literal

from surefoot.errors import ConfigError, Setting, out_of_range

_SIZE = re.compile(r"([0-9]+(?:_[0-9]+)*)(\s*tokens?)?", re.ASCII | re.IGNORECASE)


@dataclass(frozen=True)
class Batching:
    """A global batch divided into `pieces` micro-batches. Both sizes are in `unit`s."""

    batch_size: int
    micro_batch_size: int
    unit: Literal["samples", "tokens"] = "samples"

    @property
    def pieces(self) -> int:
        """The number of micro-batches per step.

        >>> batching("4096 tokens", "1024 tokens").pieces
        4
        """
        return self.batch_size // self.micro_batch_size

    def shares(self, ranks: int, *, shards: int = 1) -> list[range]:
        """Return the micro-batches of each rank. They differ in number by at most one.

        Each model copy has consecutive micro-batches. The ranks that share one copy, `shards` of
        them, take turns.

        >>> batching(8, 1).shares(3), batching(8, 1).shares(2, shards=2)
        ([range(0, 2), range(2, 5), range(5, 8)], [range(0, 8, 2), range(1, 8, 2)])
        """
        copies = ranks // shards
        bounds = [self.pieces * copy // copies for copy in range(copies + 1)]
        by_rank = []
        for rank in range(ranks):
            copy, turn = divmod(rank, shards)
            by_rank.append(range(bounds[copy] + turn, bounds[copy + 1], shards))
        return by_rank

    def on_each_rank(self, ranks: int) -> str:
        """Return the number of micro-batches of each rank in words.

        >>> batching(8, 1).on_each_rank(2), batching(8, 1).on_each_rank(3)
        ('4', '2 or 3')
        """
        fewest, rest = divmod(self.pieces, ranks)
        return f"{fewest} or {fewest + 1}" if rest else str(fewest)

    def of_equal_samples(self, length: int) -> "Batching":
        """Convert token sizes to samples of one length. A micro-batch has as many samples as fit.

        >>> batching("4096 tokens", "1024 tokens").of_equal_samples(100)
        Batching(batch_size=40, micro_batch_size=10, unit='samples')
        """
        rows = self.micro_batch_size // length
        if rows < 1:
            raise ConfigError(
                "micro-batch-shorter-than-sample",
                problem=f"micro-batches of {self.micro_batch_size} tokens cannot hold a sample of"
                f" {length} tokens",
                remedy=Setting("micro_batch_size", f"{length} tokens"),
                setting="micro_batch_size",
                value=self.micro_batch_size,
                length=length,
            )
        return Batching(rows * self.pieces, rows)

    def to_dict(self) -> dict[str, int | str]:
        """Return the settings in the form that a resume compares."""
        return {
            "batch_size": _with_unit(self.batch_size, self.unit),
            "micro_batch_size": _with_unit(self.micro_batch_size, self.unit),
        }


def batching(batch_size: int | str | None, micro_batch_size: int | str | None) -> Batching:
    """Parse sizes in samples (64) or tokens ("4096 tokens"). If `micro_batch_size` is None, a step
    is one micro-batch. Raises `ConfigError` with the nearest valid sizes.

    >>> batching(64, 16)
    Batching(batch_size=64, micro_batch_size=16, unit='samples')
    """
    total, unit = _parsed("batch_size", batch_size)
    if micro_batch_size is None:
        return Batching(total, total, unit)
    piece, unit_of_piece = _parsed("micro_batch_size", micro_batch_size)
    if unit != unit_of_piece:
        raise ConfigError(
            "batch-sizes-in-two-units",
            problem=f"batch_size = {batch_size} is in {unit} and micro_batch_size ="
            f" {micro_batch_size} in {unit_of_piece}",
            remedy=Setting("micro_batch_size", _with_unit(piece, unit)),
            setting="micro_batch_size",
            value=micro_batch_size,
            batch_size=batch_size,
        )
    if total % piece:
        divisors = _divisors_beside(piece, total)
        fitting = max(1, round(total / piece)) * piece
        raise ConfigError(
            "micro-batch-size-not-divisor",
            problem=f"batch_size = {batch_size} cannot be divided evenly into micro-batches of"
            f" {micro_batch_size}",
            remedy=[
                *(Setting("micro_batch_size", _with_unit(size, unit)) for size in divisors),
                Setting("batch_size", _with_unit(fitting, unit)),
            ],
            setting="micro_batch_size",
            value=micro_batch_size,
            batch_size=batch_size,
        )
    return Batching(total, piece, unit)


def one_each(batch_size: int | str | None, *, ranks: int) -> int | str:
    """Return the micro-batch size that gives each rank one micro-batch per step. Raises
    `ConfigError` if the ranks do not divide the batch.

    >>> one_each(64, ranks=2), one_each("4096 tokens", ranks=4)
    (32, '1024 tokens')
    """
    total, unit = _parsed("batch_size", batch_size)
    if total % ranks == 0:
        return _with_unit(total // ranks, unit)
    possible_ranks = _divisors_beside(ranks, total)
    fitting = -(-total // ranks) * ranks
    raise ConfigError(
        "batch-size-not-divisible",
        problem=f"batch_size = {batch_size} cannot be divided evenly among {ranks} ranks",
        remedy=[
            Setting("batch_size", _with_unit(fitting, unit)),
            (" or ".join(map(str, possible_ranks)), "ranks"),
        ],
        setting="batch_size",
        value=batch_size,
        ranks=ranks,
    )


def _divisors_beside(number: int, total: int) -> list[int]:
    """Return the nearest divisors of `total` below and above a number, or one if both are equal."""
    divisors = [size for size in range(1, total + 1) if total % size == 0]
    below = max((size for size in divisors if size < number), default=1)
    above = min((size for size in divisors if size > number), default=total)
    return sorted({below, above})


def _parsed(name: str, size: int | str | None) -> tuple[int, Literal["samples", "tokens"]]:
    if size is None:
        raise ConfigError(
            "batch-size-missing",
            problem="batch_size is not set: the number of samples of a step, over all micro-batches"
            " and processes",
            reason="only a DataLoader as train_data brings its own",
            remedy=Setting("batch_size", 64),
            setting="batch_size",
        )
    match = _SIZE.fullmatch(str(size).strip())
    if match is None or int(match[1]) < 1:
        meaning = "a number of samples, such as 64, or of tokens, such as '4096 tokens'"
        raise out_of_range(name, size, meaning)
    return int(match[1]), "samples" if match[2] is None else "tokens"


def _with_unit(size: int, unit: str) -> int | str:
    return size if unit == "samples" else f"{size} tokens"
