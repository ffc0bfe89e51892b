"""Fingerprints and sketches of tensors: what is compared of them, computed where the tensors are.

A fingerprint is the list of sums over i of odd[i] * number[i] mod 2^64, over chunks of a tensor's
bytes as 32-bit integers, with fixed random odd factors: multilinear hashing,
https://arxiv.org/abs/1202.4961. Each change of a single number changes the fingerprint. Any other
change is missed with probability 2^-32 at most. Version counters of torch do not suffice:
`parameter.data.mul_(2)` leaves them unchanged.

A sketch is compared up to rounding, where kernels are not deterministic.

Numbers are taken in the order in which they stand in memory, so that a tensor in any dense layout
is not copied. A view with gaps is.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

_ON_CPU = 1 << 18  # numbers in a chunk, which stay in a core's cache with their factors
_ON_DEVICE = 1 << 20
_BLOCKS = 1 << 16  # of a sketch
ROUNDING = 1e-4  # relative difference of two passes with nondeterministic kernels


@dataclass(frozen=True, eq=False)
class Fingerprint:
    """Dtype, shape, layout and sums of a tensor. The sums stay on its device until they are read."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    layout: tuple[int, ...]  # the dimensions, the outermost in memory first
    sums: Tensor  # int64: (chunks,)

    @property
    def kind(self) -> tuple[torch.dtype, tuple[int, ...], tuple[int, ...], torch.device]:
        return self.dtype, self.shape, self.layout, self.sums.device


@torch.no_grad()
def tensor_fingerprint(tensor: Tensor) -> Fingerprint:
    """Return the fingerprint of a tensor. The host waits for nothing, and a dense tensor is not
    copied as a whole.

    >>> first = tensor_fingerprint(torch.tensor([1.0, 0.0]))
    >>> equal_fingerprints([(first, tensor_fingerprint(torch.tensor([1.0, 0.0])))])
    [True]
    >>> equal_fingerprints([(first, tensor_fingerprint(torch.tensor([1.0, -0.0])))])
    [False]
    """
    flat, layout = _in_memory_order(tensor)
    odd = _odd_factors(flat.device)
    products = torch.empty_like(odd)
    sums = []
    for chunk in _chunks(flat.view(torch.uint8), len(odd)):
        product = torch.mul(chunk, odd[: len(chunk)], out=products[: len(chunk)])
        sums.append(product.sum())
    return Fingerprint(tensor.dtype, tuple(tensor.shape), layout, torch.stack(sums))


def _chunks(content: Tensor, count: int) -> Iterator[Tensor]:
    """Yield bytes as 32-bit integers, `count` at a time; single bytes if 4 does not divide them."""
    if len(content) % 4:
        yield from torch.split(content, count)
    elif content.storage_offset() % 4:
        for chunk in torch.split(content, 4 * count):
            yield chunk.clone().view(torch.int32)  # an integer stands at an address of its size
    else:
        yield from torch.split(content.view(torch.int32), count)


def _in_memory_order(tensor: Tensor) -> tuple[Tensor, tuple[int, ...]]:
    """Return the numbers of a tensor as one dimension, and its dimensions from the outermost."""
    plain = tensor.detach().resolve_conj().resolve_neg()
    strides = plain.stride()
    wide = [dim for dim in range(plain.ndim) if plain.shape[dim] > 1]
    narrow = [dim for dim in range(plain.ndim) if plain.shape[dim] <= 1]  # of any stride
    layout = (*sorted(wide, key=lambda dim: -strides[dim]), *narrow)
    return plain.permute(layout).contiguous().reshape(-1), layout


def read_fingerprints(fingerprints: Sequence[Fingerprint]) -> list[list[int]]:
    """Return the sums of each fingerprint. The host waits once for each device."""
    numbers: list[list[int]] = [[] for _ in fingerprints]
    for indices in _by_device([fingerprint.sums.device for fingerprint in fingerprints]):
        of_device = torch.cat([fingerprints[index].sums for index in indices]).tolist()
        start = 0
        for index in indices:
            stop = start + len(fingerprints[index].sums)
            numbers[index] = of_device[start:stop]
            start = stop
    return numbers


def equal_fingerprints(pairs: Sequence[tuple[Fingerprint, Fingerprint]]) -> list[bool]:
    """Return for each pair if the tensors had equal bits. The host waits once for each device."""
    equal = [first.kind == second.kind for first, second in pairs]
    comparable = [index for index, is_alike in enumerate(equal) if is_alike]
    for places in _by_device([pairs[index][0].sums.device for index in comparable]):
        indices = [comparable[place] for place in places]
        matches = [torch.eq(pairs[index][0].sums, pairs[index][1].sums).all() for index in indices]
        for index, is_equal in zip(indices, torch.stack(matches).tolist(), strict=True):
            equal[index] = is_equal
    return equal


@dataclass(frozen=True, eq=False)
class Sketch:
    """Dtype and shape of a floating tensor, sums of its blocks with random signs, and its largest
    size.

    A block is one number in a tensor of up to 65,536, so that such a tensor is compared number by
    number.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    layout: tuple[int, ...]
    block: int  # numbers in a block
    sums: Tensor  # (blocks,)
    largest: Tensor  # ()

    @property
    def kind(self) -> tuple[torch.dtype, tuple[int, ...], tuple[int, ...], torch.device]:
        return self.dtype, self.shape, self.layout, self.sums.device


@torch.no_grad()
def sketch(tensor: Tensor) -> Sketch:
    """Return the sketch of a floating or complex tensor. The host waits for nothing.

    In a tensor of n > 65,536 numbers, a change of one number by sqrt(n / 65,536) * 1e-4 of the
    largest is seen: by 0.2 % among 3e7 numbers.
    """
    flat, layout = _in_memory_order(tensor)
    if flat.is_complex():
        flat = torch.view_as_real(flat).reshape(-1)
    block = max(1, math.ceil(len(flat) / _BLOCKS))
    dtype = torch.float32 if tensor.device.type == "mps" else torch.float64  # mps has no float64
    signs = _signs(block, flat.device, dtype)
    sums = []
    largest = torch.zeros((), dtype=dtype, device=flat.device)
    # a few blocks at once: the tensor is not converted as a whole
    for rows in torch.split(flat, block * max(1, _ON_CPU // block)):
        numbers = rows.to(dtype)
        whole = len(numbers) - len(numbers) % block
        sums.append((numbers[:whole].view(-1, block) * signs).sum(1))
        if whole < len(numbers):
            rest = numbers[whole:]
            sums.append((rest * signs[: len(rest)]).sum().reshape(1))
        if len(numbers):
            finite = numbers.abs().nan_to_num(nan=0.0, posinf=0.0)
            largest = torch.maximum(largest, finite.max())
    return Sketch(tensor.dtype, tuple(tensor.shape), layout, block, torch.cat(sums), largest)


def near_sketches(first: Sketch, second: Sketch) -> bool:
    """Return True if two tensors were equal up to rounding. The host waits for the device."""
    if first.kind != second.kind:
        return False
    allowed = first.largest * math.sqrt(first.block) + first.sums.abs()
    difference = (first.sums - second.sums).abs()
    is_near = (difference <= ROUNDING * allowed) & difference.isfinite()
    is_same = torch.isclose(first.sums, second.sums, rtol=0.0, atol=0.0, equal_nan=True)
    return bool((is_near | is_same).all())


@cache
def _signs(count: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    if count == 1:
        return torch.ones(1, device=device, dtype=dtype)
    generator = torch.Generator().manual_seed(0)  # not the run's generator
    signs = 2 * torch.randint(2, (count,), generator=generator) - 1
    return signs.to(device=device, dtype=dtype)


def _by_device(devices: Iterable[torch.device]) -> list[list[int]]:
    indices: dict[torch.device, list[int]] = {}
    for index, device in enumerate(devices):
        indices.setdefault(device, []).append(index)
    return list(indices.values())


@cache
def _odd_factors(device: torch.device) -> Tensor:
    generator = torch.Generator().manual_seed(0)  # not the run's generator
    count = _ON_CPU if device.type == "cpu" else _ON_DEVICE
    factors = torch.randint(-(1 << 62), 1 << 62, (count,), generator=generator) * 2 + 1
    return factors.to(device)
