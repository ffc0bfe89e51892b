"""Values of live objects: compared, to the bit or to rounding, put back in their place, and refused where a run would lose them."""

import random
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from operator import is_not
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from surefoot.checkpoint.tensor_file import equal_bits
from surefoot.distributed.shards import held_of
from surefoot.errors import ConfigError

_ROUNDING = 1e-4  # relative, between two passes where kernels are not deterministic


class Counted(NamedTuple):
    """A tensor too large to be copied, by its shape and its counter of changes in place."""

    shape: tuple[int, ...]
    version: int


def generator_state(generator: Any) -> tuple[Any, Callable[[Any], None]]:
    """The state of a generator of torch, Python or NumPy, and what sets it."""
    match generator:
        case np.random.Generator(bit_generator=bits):
            return bits.state, partial(setattr, bits, "state")
        case random.Random():
            return generator.getstate(), generator.setstate
    return generator.get_state(), generator.set_state


def same(earlier: Any, later: Any, *, exact: bool = True) -> bool:
    """Whether two values are of one type and equal, tensors and floats to the bit or (not `exact`) to rounding.

    A tensor that only one observation had room to copy counts as equal: nothing is known of it.
    """
    if isinstance(earlier, Counted) != isinstance(later, Counted):
        return True
    if type(earlier) is not type(later):
        return False
    if isinstance(earlier, float):
        earlier, later = torch.tensor(earlier, dtype=torch.float64), torch.tensor(later, dtype=torch.float64)
    if not isinstance(earlier, Tensor):
        return bool(earlier == later)
    if exact or not earlier.is_floating_point() or (earlier.shape, earlier.dtype) != (later.shape, later.dtype):
        return equal_bits(earlier, later)
    size = earlier.abs().nan_to_num(posinf=0.0).max() if earlier.numel() else 0.0
    return torch.allclose(earlier, later, rtol=_ROUNDING, atol=_ROUNDING * float(size), equal_nan=True)


def reset_tensor(tensor: Tensor, local: Tensor, numbers: Tensor) -> None:
    if held_of(tensor)[0].data_ptr() != local.data_ptr():
        tensor.data = local  # other memory was put in its place
    if not same(local.cpu(), numbers.cpu()):
        local.copy_(numbers)


def reset(live: Any, before: Any) -> None:
    """Give a dict, list, deque or set back the entries that it had, unless they are the same."""
    flat = (lambda each: [*each, *each.values()]) if isinstance(live, dict) else list
    if len(live) != len(before) or any(map(is_not, flat(live), flat(before))):
        live.clear()
        (live.extend if isinstance(live, list | deque) else live.update)(before)


def refuse_unsaved(names_by_rank: Sequence[Sequence[str]], *, when: str) -> None:
    """Raise `ConfigError` if values change `when` ("in every pass") that no checkpoint holds."""
    first, *others = dict.fromkeys([name for names in names_by_rank for name in names]) or [""]
    if first:
        also = f" (nor {', '.join(others[:2])}{', ...' * (len(others) > 2)})" * bool(others)
        raise ConfigError(
            f"{first} changes {when}, and no checkpoint holds it{also}\n"
            "  a run that is killed would resume without it, as another run than one that was left alone\n"
            "  use register_buffer, or run.register_state(name, the dict, list, tensor or object that holds it), or a global generator;"
            " if nothing depends on it: check_state=False (--check-state False)"
        )


class NotPutBackError(ConfigError):
    """Something that a pass changed could not be changed back."""
