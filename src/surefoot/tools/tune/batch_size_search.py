"""The choice of micro-batch sizes to try and to recommend, as pure arithmetic on measurements."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from surefoot.memory import in_words
from surefoot.tracking.format import text_table

_CLOSE = 0.97  # of the best throughput: the last 3% are not worth the memory of a larger size


@dataclass(frozen=True)
class SizeTrial:
    """A micro-batch size with its accumulation steps, memory and throughput. Throughputs are None
    if the size fails.
    """

    size: int
    accumulation: int
    memory_bytes: (
        int | None
    )  # peak of the whole run on the device; predicted if the size was not tried
    samples_per_s: float | None = None
    targets_per_s: float | None = None
    problem: str = ""

    @property
    def fits(self) -> bool:
        return self.samples_per_s is not None


@dataclass(frozen=True)
class BatchSizeSearch:
    """The sizes that `find_batch_size` tried, in ascending order, and its recommendation. All rows
    have the same `batch_size`.

    >>> row = SizeTrial(size=16, accumulation=2, memory_bytes=10**9, samples_per_s=500.0)
    >>> BatchSizeSearch(
    ...     [row], 32, "samples", 4 * 10**9, recommended=row, fastest=row, largest=row
    ... ).flags
    '--batch-size 32 --micro-batch-size 16'
    """

    tried: list[SizeTrial]
    batch_size: int
    unit: Literal["samples", "tokens"]
    limit_bytes: int
    recommended: SizeTrial
    fastest: SizeTrial
    largest: SizeTrial

    @property
    def flags(self) -> str:
        """The command-line flags of the recommended sizes."""
        sizes = (self.batch_size, self.recommended.size)
        batch, micro_batch = (
            f"{size}" if self.unit == "samples" else f'"{size} tokens"' for size in sizes
        )
        return f"--batch-size {batch} --micro-batch-size {micro_batch}"

    def to_dict(self) -> dict[str, Any]:
        """Return all fields as JSON values."""
        return asdict(self) | {"flags": self.flags, "reason": self.reason}

    def __str__(self) -> str:
        head = ["micro-batch", "accumulation", "memory", "samples/s", "targets/s", ""]
        table = text_table([head, *map(_row, self.tried)], left=(5,))
        return "\n".join([*table, "", f"recommended  {self.flags}", f"  {self.reason}"])

    @property
    def reason(self) -> str:
        """A sentence that justifies the recommended size and names the fastest and the largest
        size.
        """
        unit, best = self.unit, self.fastest
        size = (
            "the whole batch"
            if self.largest.size == self.batch_size
            else f"{self.largest.size} {unit}"
        )
        rated = "samples" if unit == "samples" else "targets"
        limit = f"the largest size that fits {in_words(self.limit_bytes)} is {size}"
        if self.recommended.size == best.size:
            return f"the fastest; {limit}"
        return f"the smallest size within 3% of the fastest, {best.size} {unit} ({_rate(best, unit):,.4g} {rated}/s); {limit}"


def search_sizes(
    attempt: Callable[[int], SizeTrial],
    sizes: Sequence[int],
    *,
    deadly_bytes: float,
    standing_bytes: int,
) -> list[SizeTrial]:
    """Try sizes that at least double, up to the whole batch. Then try sizes above the largest that
    fits, and neighbors of the fastest.

    A size that does not fit does not end the search: a larger size may need less memory, because
    large losses are computed in chunks. Sizes predicted to need more than `deadly_bytes` are
    skipped, because the system would kill the process. Predictions lie on a line through the two
    largest tried sizes. If only one size was tried or memory fell, the line starts at
    `standing_bytes` for size 0. Returns the trials in order of size, plus the smallest skipped size
    with its prediction.

    >>> def attempt(size):
    ...     fits = 100 + 10 * size <= 1000
    ...     return SizeTrial(size, 96 // size, 100 + 10 * size, float(size) if fits else None)
    >>> divisors = [size for size in range(1, 97) if 96 % size == 0]
    >>> [row.size for row in search_sizes(attempt, divisors, deadly_bytes=1000, standing_bytes=100)]
    [1, 2, 4, 8, 16, 32, 48, 96]
    """
    trials: dict[int, SizeTrial] = {}

    def predicted(size: int) -> float:
        known = sorted(
            (row.size, row.memory_bytes) for row in trials.values() if row.memory_bytes is not None
        )
        if not known:
            return 0.0
        falls = len(known) == 1 or known[-1][1] <= known[-2][1]
        (small, low), (large, high) = ((0, standing_bytes), known[-1]) if falls else known[-2:]
        return high + (high - low) / (large - small) * (size - large)

    def tried(size: int) -> bool:
        if size not in trials and predicted(size) <= deadly_bytes:
            trials[size] = attempt(size)
        return size in trials

    size = sizes[0]
    while tried(size) and size < sizes[-1]:
        size = next((candidate for candidate in sizes if candidate >= 2 * size), sizes[-1])
    largest = max((row.size for row in trials.values() if row.fits), default=sizes[-1])
    too_large = min(
        (candidate for candidate in trials if candidate > largest), default=sizes[-1] + 1
    )
    for between in sorted(
        (candidate for candidate in sizes if largest < candidate < too_large), reverse=True
    ):
        if tried(between) and trials[between].fits:
            break
    if working := [row for row in trials.values() if row.fits]:
        index = sizes.index(max(working, key=lambda row: row.samples_per_s or 0.0).size)
        for neighbor in sizes[max(0, index - 1) : index + 2]:
            tried(neighbor)
    rows = [trials[size] for size in sorted(trials)]
    left = next((candidate for candidate in sizes if rows and candidate > rows[-1].size), None)
    if left is not None and predicted(left) > deadly_bytes:
        pieces = rows[-1].size * rows[-1].accumulation // left
        rows.append(
            SizeTrial(left, pieces, int(predicted(left)), problem="not tried: predicted not to fit")
        )
    return rows


def recommend(
    tried: list[SizeTrial], *, batch_size: int, unit: Literal["samples", "tokens"], limit_bytes: int
) -> BatchSizeSearch | None:
    """Recommend the smallest size within 3% of the best throughput; return None if no size fits.

    >>> rows = [
    ...     SizeTrial(1, 4, 10, 50.0, 50.0),
    ...     SizeTrial(2, 2, 20, 98.0, 98.0),
    ...     SizeTrial(4, 1, 40, 100.0, 100.0),
    ... ]
    >>> found = recommend(rows, batch_size=4, unit="samples", limit_bytes=99)
    >>> found.flags, found.fastest.size
    ('--batch-size 4 --micro-batch-size 2', 4)
    """
    if not (working := [row for row in tried if row.fits]):
        return None
    fastest = max(working, key=lambda row: _rate(row, unit))
    close = [row for row in working if _rate(row, unit) >= _CLOSE * _rate(fastest, unit)]
    return BatchSizeSearch(
        tried,
        batch_size,
        unit,
        limit_bytes,
        recommended=min(close, key=lambda row: row.size),
        fastest=fastest,
        largest=max(working, key=lambda row: row.size),
    )


def _rate(row: SizeTrial, unit: str) -> float:
    return (row.samples_per_s if unit == "samples" else row.targets_per_s) or 0.0


def _row(tried: SizeTrial) -> list[str]:
    memory = "" if tried.memory_bytes is None else in_words(tried.memory_bytes)
    rates = [
        "" if rate is None else f"{rate:,.0f}" if rate >= 100 else f"{rate:.3g}"
        for rate in (tried.samples_per_s, tried.targets_per_s)
    ]
    return [f"{tried.size:,}", f"{tried.accumulation:,}", memory, *rates, tried.problem]
