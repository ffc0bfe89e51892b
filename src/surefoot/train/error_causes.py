"""Likely causes of an error in a step: known mistakes, and samples with out-of-range or non-finite
values.
"""

import os
import re
import tempfile
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointError as RecomputedOtherwise

from surefoot.data.loader import MicroBatch
from surefoot.data.nested import tensors
from surefoot.errors import ConfigError, DataError, Setting, SurefootError, first_line
from surefoot.train.loop import Step
from surefoot.train.loss_accumulator import loss_without_gradient

_OF_SHAPES = re.compile(
    r"shape|sizes? |batch_size|dimension|broadcast|channels|target tensor|numbers of samples",
    re.IGNORECASE,
)
_WHOLES = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


@contextmanager
def explaining(step: Step | Callable[[], Step]) -> Iterator[None]:
    """Replace an exception that `step` raises in this block by an error that explains it, if the
    cause is known.
    """
    try:
        yield
    except Exception as problem:
        failed_step = step if isinstance(step, Step) else step()
        cause = explained(
            problem, where=f"at step {failed_step.index}", micro_batches=failed_step.micro_batches
        )
        if cause is None:
            samples: list[str] = []
            for micro_batch in failed_step.micro_batches:
                samples += map(str, micro_batch.sample_ids)
            shown = ", ".join(samples[:5])
            if len(samples) > 5:
                shown += " ..."
            with noting(f"at step {failed_step.index}, samples {shown}"):
                raise
        raise cause from problem


@contextmanager
def noting(what: str) -> Iterator[None]:
    """Add a note, such as "in the metric 'f1'", to an exception of this block. The message of a
    `SurefootError` has it already.
    """
    try:
        yield
    except Exception as problem:
        if not isinstance(problem, SurefootError) and what not in getattr(problem, "__notes__", ()):
            problem.add_note(what)
        raise


@contextmanager
def explaining_shapes(what: str, *tried: Any, named: Sequence[str], cure: str) -> Iterator[None]:
    """Replace torch's or NumPy's error about shapes by one that names the shapes of the values
    `tried`, as `named`.
    """
    try:
        with noting(f"in {what}"):
            yield
    except (RuntimeError, ValueError, IndexError) as problem:
        is_of_memory = isinstance(problem, torch.OutOfMemoryError)
        if is_of_memory or of_compiler(problem) or not _is_of_shapes(problem):
            raise
        shapes = []
        for value in tried:
            of_tensors = [str(tuple(tensor.shape)) for tensor in tensors(value)]
            shapes.append(", ".join(of_tensors) or "no tensor")
        pairs = zip(named, shapes, strict=True)
        shapes_of_values = " and ".join(f"{name}: {shape}" for name, shape in pairs)
        text = first_line(problem)[:200]
        raise ConfigError(
            "shapes-misfit",
            problem=f"{what} cannot use these shapes: {text}",
            reason=shapes_of_values,
            remedy=cure,
            where=what,
            shapes=shapes,
        ) from problem


def _is_of_shapes(problem: Exception) -> bool:
    text = first_line(problem)
    place = traceback.extract_tb(problem.__traceback__)[-1]
    by_user = (place.line or "").startswith("raise") and "site-packages" not in place.filename
    return not by_user and "out of bounds" not in text and _OF_SHAPES.search(text) is not None


def explaining_metric(metric: str, pair: tuple[Any, ...] | None) -> AbstractContextManager[None]:
    """Explain an error of a metric about the shapes of (outputs, targets), as `explaining_shapes`
    does.
    """
    cure = (
        "let the metric take these, or give it others:"
        " Split(predict=lambda model, batch: (outputs, targets))"
    )
    return explaining_shapes(
        f"the metric {metric!r}", *(pair or ()), named=("outputs", "targets"), cure=cure
    )


def explained(
    problem: Exception, *, where: str, micro_batches: Sequence[MicroBatch]
) -> SurefootError | None:
    """Return an error that explains an exception, raised `where`, such as "at step 3". Returns None
    if the cause is unknown.
    """
    text = str(problem)
    target = re.search(
        r"Target (-?\d+) is out of bounds|index (-?\d+) is out of bounds for dimension", text
    )
    in_cross_entropy = any(
        "cross_entropy" in frame.name for frame in traceback.extract_tb(problem.__traceback__)
    )
    is_of_index = isinstance(problem, IndexError | RuntimeError)
    if is_of_index and target and (target[1] or in_cross_entropy):
        number = int(target[1] or target[2])

        def is_number(values: torch.Tensor) -> torch.Tensor | None:
            return values == number if values.dtype in _WHOLES else None

        ids = _ids_where(micro_batches, is_number)
        samples = ", ".join(map(str, ids[:5])) or "unknown"
        if target[1] or ids:
            return DataError(
                "target-out-of-range",
                problem=f"target {number} is out of range {where}, sample {samples}",
                reason="class indices run from 0 to the number of model outputs minus 1 (-100 is"
                " ignored)",
                remedy="correct the labels, or give the model more outputs",
                value=number,
                samples=ids,
                where=where,
            )
    if isinstance(problem, IndexError) and "index out of range in self" in text:
        return DataError(
            "index-beyond-embedding",
            problem=f"an index exceeds the size of its embedding {where}",
            reason="a token or class index is outside the model's vocabulary",
            where=where,
        )
    if of_compiler(problem):
        lines_of_error = [line for line in text.splitlines() if "Error" in line]
        cause = lines_of_error[-1] if lines_of_error else type(problem).__name__
        usual_cache = Path(tempfile.gettempdir()) / "torchinductor_USER"
        cache = os.environ.get("TORCHINDUCTOR_CACHE_DIR") or usual_cache
        return ConfigError(
            "compile-failed",
            problem=f"torch.compile failed {where}: {cause.strip()[:200]}",
            remedy=[
                Setting("compile", False),
                "if an earlier compilation was killed, its cache may be damaged: remove the"
                f" directory {cache}",
            ],
            setting="compile",
            where=where,
        )
    if isinstance(problem, RecomputedOtherwise):
        return ConfigError(
            "recomputed-otherwise",
            problem=f"a block recomputed {where} differs from its first forward pass:"
            f" {first_line(problem)[:200]}",
            reason="its forward depends on state that changed in between, other than buffers and"
            " the global random generators",
            remedy=[
                ("exclude the block:", Setting("activation_checkpointing_modules")),
                Setting("activation_checkpointing", "off"),
            ],
            where=where,
        )
    if not isinstance(problem, RuntimeError) or isinstance(problem, torch.OutOfMemoryError):
        return None
    # words of torch
    if "selective activation checkpoint has been mutated" in text:
        return ConfigError(
            "selective-checkpointing-in-place",
            problem="activation_checkpointing = selective stores the outputs of matrix products,"
            " and a block changes one in place",
            reason="torch.nn.ReLU(inplace=True) after a linear layer or a convolution does, or"
            " x += y",
            remedy=[
                "make the operation out of place",
                Setting("activation_checkpointing", "blocks"),
            ],
            setting="activation_checkpointing",
        )
    if "encountered during backward but not found in storage" in text:
        return ConfigError(
            "selective-checkpointing-of-block",
            problem="activation_checkpointing = selective does not support a block that is called"
            " several times in one pass under bf16 or fp16 (its weights are cast only once), nor a"
            " block that itself recomputes activations",
            remedy=Setting("activation_checkpointing", "blocks"),
            setting="activation_checkpointing",
        )
    if "does not require grad" in text:
        return loss_without_gradient().inside(where)
    return None


def of_compiler(problem: BaseException | None) -> bool:
    """Return True if an exception, or one of its causes, comes from torch.compile."""
    while problem is not None:
        for kind in type(problem).__mro__:
            if kind.__module__.startswith(("torch._inductor", "torch._dynamo")):
                return True
        problem = problem.__cause__
    return False


def strange_samples(micro_batches: Sequence[MicroBatch]) -> list[int]:
    """Return the ids of samples with NaN or infinite floating-point inputs. Waits for the
    device.
    """

    def is_strange(values: torch.Tensor) -> torch.Tensor | None:
        return ~torch.isfinite(values) if values.is_floating_point() else None

    return _ids_where(micro_batches, is_strange)


def _ids_where(
    micro_batches: Sequence[MicroBatch], where: Callable[[torch.Tensor], torch.Tensor | None]
) -> list[int]:
    ids: set[int] = set()
    for micro_batch in micro_batches:
        for tensor in tensors(micro_batch.batch):
            if tensor.ndim > 0 and len(tensor) == len(micro_batch.sample_ids):
                places = where(tensor.reshape(len(tensor), -1))
                if places is None:
                    continue
                for row in places.any(dim=1).nonzero().flatten().tolist():
                    ids.add(int(micro_batch.sample_ids[row]))
    return sorted(ids)
