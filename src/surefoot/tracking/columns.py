"""Training records as arrays, which take no Python code for each value.

The text between the numbers of a block is compared with that of its first record. Lines of another
form are parsed as JSON.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from surefoot.tracking.jsonl import kept_records, parse_numbers, parse_record
from surefoot.tracking.record import Record

_LEAST_BYTES = 1 << 13  # of lines that are worth arrays
_HEAD = b'{"kind": "train"'
_WIDEST = 24  # bytes of a number: three words of eight digits
_AT_ONCE = 1 << 14  # numbers whose intermediate values fit into a cache
_ONES = 0x0101010101010101  # a digit of each byte
_OWN = np.array(  # by width, the bytes of each word that belong to the number
    [
        [(1 << 64) - (1 << 8 * (8 - min(8, max(0, width - after)))) for width in range(_WIDEST + 1)]
        for after in (16, 8, 0)
    ],
    np.uint64,
)
_POINTS = np.array(
    [[sum((after + byte + 1) << 8 * byte for byte in range(8))] for after in (16, 8, 0)], np.uint64
)
_SPLIT = 2.0**27 + 1
_TENS = np.array([10.0**power for power in range(23)])  # exact
_INTEGER_TENS = 10 ** np.arange(20, dtype=np.uint64)


@dataclass(frozen=True, eq=False)
class Columns:
    """Training records with the same names: one array of integers or of floating-point numbers for
    each name but "kind".
    """

    values: dict[str, NDArray[Any]]

    def __len__(self) -> int:
        return len(self.values["step"])

    def __getitem__(self, part: slice | NDArray[np.bool_]) -> "Columns":
        return Columns({name: numbers[part] for name, numbers in self.values.items()})

    def records(self) -> list[Record]:
        rows = zip(*(numbers.tolist() for numbers in self.values.values()), strict=True)
        return [{"kind": "train", **dict(zip(self.values, row, strict=True))} for row in rows]


def in_columns(blocks: Iterable[tuple[bytes, int | None]]) -> Iterator[Columns | list[Record]]:
    """Yield the records in blocks of lines; of a block with a last step, only events and records
    until this step.

    The order is kept among training records and among other records, and the last record stays
    last.
    """
    for lines, last_step in blocks:
        is_large, middle = len(lines) >= _LEAST_BYTES, lines.find(b"\n", len(lines) // 2) + 1
        try:
            parts = _columns_in(lines, last_step) if is_large else None
        except (IndexError, ValueError, OverflowError, RecursionError):
            parts = None
        if parts is not None:
            yield from filter(len, parts)
        elif is_large and 0 < middle < len(lines):
            yield from in_columns([(lines[:middle], last_step), (lines[middle:], last_step)])
        else:
            yield kept_records(lines, last_step)


def _columns_in(lines: bytes, last_step: int | None) -> Sequence[Columns | list[Record]] | None:
    """Return the training records and the others, in the order of their last lines.

    Returns None or raises `ValueError`, `OverflowError` or `IndexError` if the training records
    differ in form.
    """
    first = lines.find(_HEAD)
    form = lines[first : lines.find(b"\n", first)]
    record, pieces = (
        parse_record(form) or {},
        [piece.rpartition(b": ") for piece in form[:-1].split(b", ")],
    )
    names, prefixes = list(record)[1:], [b", " + name + colon for name, colon, _ in pieces[1:]]
    are_numbers = (
        all(type(record[name]) in (int, float) for name in names) and "loss_applied" not in names
    )
    if not (
        names
        and are_numbers
        and lines.endswith(b"\n")
        and len(names) == len(prefixes) == form.count(b",")
    ):
        return None
    text = np.frombuffer(lines, np.uint8)
    ends, commas = np.flatnonzero(text == ord("\n")), np.flatnonzero(text == ord(","))
    begins = np.concatenate([[0], ends[:-1] + 1])
    is_train = _texts(lines, len(_HEAD))[np.minimum(begins, len(lines) - len(_HEAD))] == _HEAD
    rest = b"".join(
        [
            lines[begin : end + 1]
            for begin, end in zip(begins[~is_train], ends[~is_train], strict=True)
        ]
    )
    begins, stops = begins[is_train], ends[is_train] - 1
    comma, after = np.searchsorted(commas, begins), np.searchsorted(commas, stops)
    is_alike = (after - comma == len(names)).all() and (text[stops] == ord("}")).all()
    others = kept_records(rest, last_step) if is_alike and b'"train"' not in rest else None
    if others is None or "train" in [each["kind"] for each in others]:
        return None
    columns: dict[str, Any] = dict.fromkeys(names)
    places, varying = [*(commas[comma + index] for index in range(len(names))), stops], []
    for name, prefix, position, stop in zip(names, prefixes, places[:-1], places[1:], strict=True):
        if _all_are(lines, position, lines[position[0] : stop[0] + 1]):
            columns[name] = np.full(
                len(position), record[name], np.int64 if type(record[name]) is int else np.float64
            )
        elif name != "skipped" and _all_are(lines, position, prefix):
            varying.append((name, position + len(prefix), stop))
        else:
            return None
    for index in range(0, len(varying), many := max(1, _AT_ONCE // len(begins))):
        some, starts, stops = zip(*varying[index : index + many], strict=True)
        shape = len(some), len(begins)
        values, integers, is_integer = (
            array.reshape(shape)
            for array in _numbers(lines, np.concatenate(starts), np.concatenate(stops))
        )
        if (is_integer.any(axis=1) != is_integer.all(axis=1)).any():
            return None
        for name, row, integer, is_whole in zip(
            some, values, integers, is_integer[:, 0], strict=True
        ):
            columns[name] = integer if is_whole else row
    if (
        columns["step"].dtype != np.int64
        or columns["step"].min() < 0
        or columns.get("skipped", np.zeros(1)).any()
    ):
        return None
    train = (
        Columns(columns) if last_step is None else Columns(columns)[columns["step"] <= last_step]
    )
    return (others, train) if is_train[-1] else (train, others)


def _texts(lines: bytes, length: int) -> NDArray[np.bytes_]:
    """Return the texts of a length from each position on."""
    return np.ndarray((max(0, len(lines) - length + 1),), f"S{length}", lines, 0, (1,))


def _all_are(lines: bytes, places: NDArray[np.int64], text: bytes) -> bool:
    middle = places[len(places) // 2]
    return lines.startswith(text, middle) and _texts(lines, len(text))[
        places
    ].tobytes() == text * len(places)


def _numbers(
    lines: bytes, starts: NDArray[np.int64], stops: NDArray[np.int64]
) -> tuple[NDArray[np.float64], NDArray[np.int64], NDArray[np.bool_]]:
    """Read numbers as JSON does: the values, the integers among them, and which are integers. Each
    number ends at byte 24 or later.

    Raises `ValueError` or `OverflowError` if a text is not a number, or is an integer of more than
    64 bits.
    """
    text = np.frombuffer(lines, np.uint8)
    is_negative = text[starts] == ord("-")
    digits = starts + is_negative
    wholes, decimals, is_usual = _decimals(lines, digits, stops)
    if not is_usual.all():  # try again without an exponent from -01 to -99
        odd = np.flatnonzero(~is_usual)
        end = stops[odd] - 4
        tail = _texts(lines, 4)[end].view((np.uint8, 4)) - np.frombuffer(b"e-00", np.uint8)
        retried = _decimals(lines, digits[odd], end)
        exponent = tail[:, 2].astype(np.int64) * 10 + tail[:, 3]
        wholes[odd], decimals[odd] = retried[0], np.maximum(retried[1], 0) + exponent
        is_usual[odd] = (
            retried[2] & (tail <= (0, 0, 9, 9)).all(axis=1) & (decimals[odd] < len(_TENS))
        )
    values, is_sure = _quotients(wholes, _TENS.take(decimals, mode="clip"))
    is_whole = decimals < 0
    for array in (values, wholes) if is_negative.any() else ():
        np.negative(array, out=array, where=is_negative)
    odd = np.flatnonzero(~(is_usual & (is_sure | is_whole)))
    for index, number in zip(
        odd, parse_numbers([lines[starts[i] : stops[i]] for i in odd]), strict=True
    ):
        if type(number) not in (int, float):
            raise ValueError("not a number")
        is_whole[index] = type(number) is int
        (wholes if is_whole[index] else values)[index] = number
    return values, wholes, is_whole


def _decimals(
    lines: bytes, starts: NDArray[np.int64], stops: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.bool_]]:
    """Return the digits of numbers as integers, how many follow the point (-1 without a point), and
    which texts are such numbers.
    """
    unsigned, text, width = np.uint64, np.frombuffer(lines, np.uint8), stops - starts
    words = np.ascontiguousarray(
        _texts(lines, _WIDEST)[stops - _WIDEST].view("<u8").reshape(-1, 3).T, unsigned
    )
    words ^= unsigned(ord("0") * _ONES)
    words &= _OWN.take(width, axis=1, mode="clip")
    points = words ^ unsigned((ord(".") ^ ord("0")) * _ONES)
    points |= (points & unsigned(0x7F * _ONES)) + unsigned(0x7F * _ONES)
    points = (~points & unsigned(0x80 * _ONES)) >> unsigned(7)  # 1 in the byte of a point
    words ^= points * unsigned(ord(".") ^ ord("0"))  # reads the point as a digit 0
    others = ((words + unsigned((0x80 - 10) * _ONES)) | words) & unsigned(
        0x80 * _ONES
    )  # bytes above 9
    count = (points * unsigned(_ONES)) >> unsigned(56)
    point = (points * _POINTS) >> unsigned(56)
    for factor, shift, mask in (
        (2561, 8, 0x00FF00FF00FF00FF),
        (6553601, 16, 0x0000FFFF0000FFFF),
        (42949672960001, 32, -1),
    ):
        words *= unsigned(factor)  # joins pairs of digits, then of pairs, then of fours
        words >>= unsigned(shift)
        words &= unsigned(mask & (1 << 64) - 1)
    wholes = (words[0] * unsigned(10**8) + words[1]) * unsigned(10**8) + words[2]
    decimals = point.sum(axis=0).view(np.int64) - 1
    first, second = text[starts] - np.uint8(ord("0")), text[starts + 1] - np.uint8(ord("0"))
    # below 2**63
    is_usual = ((others[0] | others[1] | others[2]) == 0) & (words[0] < 900) & (width <= _WIDEST)
    is_usual &= (count.sum(axis=0) == (decimals >= 0)) & (decimals != 0)
    is_usual &= (first < 10) & ((first > 0) | (second > 9))
    ten = _INTEGER_TENS.take(decimals, mode="clip")
    # removes the point's digit
    wholes -= wholes // (ten * unsigned(10)) * (ten * unsigned(9)) * (decimals >= 0)
    return wholes.view(np.int64), decimals, is_usual


def _quotients(
    wholes: NDArray[np.int64], tens: NDArray[np.float64]
) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """Return integers divided by powers of ten, rounded as `float` does, and where this is sure.

    The quotient of the nearest numbers is corrected by its exact remainder (Dekker 1971).
    """
    nearest = wholes.astype(np.float64)
    quotients = nearest / tens
    product, upper, upper_ten = (
        quotients * tens,
        *(each * _SPLIT - (each * _SPLIT - each) for each in (quotients, tens)),
    )
    lower, lower_ten = quotients - upper, tens - upper_ten
    excess = (
        (upper * upper_ten - product) + upper * lower_ten + lower * upper_ten
    ) + lower * lower_ten
    rest = ((nearest - product) - excess + (wholes - nearest.astype(np.int64))) / tens
    values = quotients + rest
    error = rest - (values - quotients)
    return values, values + error * (1 + 1e-10) == values
