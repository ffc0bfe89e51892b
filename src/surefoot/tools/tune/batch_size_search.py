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
    # peak of the whole run on the device; predicted if the size was not tried
    memory_bytes: int | None
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
    >>> best = {"recommended": row, "fastest": row, "largest": row}
    >>> BatchSizeSearch([row], 32, "samples", 4 * 10**9, **best).flags
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
        batch = str(self.batch_size)
        micro_batch = str(self.recommended.size)
        if self.unit == "tokens":
            batch = f'"{batch} tokens"'
            micro_batch = f'"{micro_batch} tokens"'
        return f"--batch-size {batch} --micro-batch-size {micro_batch}"

    def to_dict(self) -> dict[str, Any]:
        """Return all fields as JSON values."""
        return asdict(self) | {"flags": self.flags, "reason": self.reason}

    def __str__(self) -> str:
        head = ["micro-batch", "accumulation", "memory", "samples/s", "targets/s", ""]
        table = text_table([head, *(_row(trial) for trial in self.tried)], left=(5,))
        return "\n".join([*table, "", f"recommended  {self.flags}", f"  {self.reason}"])

    @property
    def reason(self) -> str:
        """A sentence that justifies the recommended size and names the fastest and the largest
        size.
        """
        unit = self.unit
        best = self.fastest
        largest = f"{self.largest.size} {unit}"
        if self.largest.size == self.batch_size:
            largest = "the whole batch"
        limit = f"the largest size that fits {in_words(self.limit_bytes)} is {largest}"
        if self.recommended.size == best.size:
            return f"the fastest; {limit}"
        rated = "samples" if unit == "samples" else "targets"
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
        known = [(0, standing_bytes)]
        for tried_size in sorted(trials):
            memory_bytes = trials[tried_size].memory_bytes
            if memory_bytes is not None:
                known.append((tried_size, memory_bytes))
        if len(known) == 1:
            return 0.0
        small, low = known[-2]
        large, high = known[-1]
        if high <= low:  # memory fell
            small, low = known[0]
        return high + (high - low) / (large - small) * (size - large)

    def tried(size: int) -> bool:
        if size not in trials and predicted(size) <= deadly_bytes:
            trials[size] = attempt(size)
        return size in trials

    def fitting() -> list[SizeTrial]:
        return [trial for trial in trials.values() if trial.fits]

    # sizes that at least double
    size = sizes[0]
    while tried(size) and size < sizes[-1]:
        doubled = [candidate for candidate in sizes if candidate >= 2 * size]
        size = doubled[0] if doubled else sizes[-1]
    # sizes between the largest that fits and the next that was tried, the largest first
    largest = max((trial.size for trial in fitting()), default=sizes[-1])
    too_large = min((other for other in trials if other > largest), default=sizes[-1] + 1)
    for between in sorted(sizes, reverse=True):
        if largest < between < too_large and tried(between) and trials[between].fits:
            break
    # neighbors of the fastest
    if fitting():
        fastest = max(fitting(), key=lambda trial: trial.samples_per_s or 0.0)
        index = sizes.index(fastest.size)
        for neighbor in sizes[max(0, index - 1) : index + 2]:
            tried(neighbor)
    rows = [trials[size] for size in sorted(trials)]
    further = [candidate for candidate in sizes if rows and candidate > rows[-1].size]
    if further and predicted(further[0]) > deadly_bytes:
        skipped = further[0]
        accumulation = rows[-1].size * rows[-1].accumulation // skipped
        problem = "not tried: predicted not to fit"
        rows.append(SizeTrial(skipped, accumulation, int(predicted(skipped)), problem=problem))
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
    working = [row for row in tried if row.fits]
    if not working:
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


def _row(trial: SizeTrial) -> list[str]:
    return [
        f"{trial.size:,}",
        f"{trial.accumulation:,}",
        "" if trial.memory_bytes is None else in_words(trial.memory_bytes),
        _rate_text(trial.samples_per_s),
        _rate_text(trial.targets_per_s),
        trial.problem,
    ]


def _rate_text(rate: float | None) -> str:
    if rate is None:
        return ""
    return f"{rate:,.0f}" if rate >= 100 else f"{rate:.3g}"
