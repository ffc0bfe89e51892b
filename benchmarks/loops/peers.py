"""Which loops are compared, and that they make the same training: a loop with other losses is not
worth timing.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter

import torch
from torch import Tensor, nn

from loops.models import Work
from loops.plain import fused, plain
from loops.training import Training

Loop = Callable[[Training], nn.Module]


@dataclass(frozen=True)
class Peer:
    """A loop by where it stands, and the plain loop whose losses it must have: bit for bit, or
    `within` a fraction.
    """

    name: str
    module: str
    function: str
    like: Loop = plain
    within: float = 0.0
    spares: bool = False  # so does the plain loop that it is held against
    package: str = "torch"  # whose version tells which loop it is

    def loop(self) -> Loop:
        """Its function; `ModuleNotFoundError` where it is not installed."""
        found: Loop = getattr(import_module(f"loops.{self.module}"), self.function)
        return found


PEERS = (
    Peer("plain", "plain", "plain"),
    Peer("plain, fused AdamW", "plain", "fused", within=1e-5),
    # its norm is summed in another order
    Peer(
        "surefoot",
        "with_surefoot",
        "surefoot",
        like=fused,
        within=1e-5,
        spares=True,
        package="surefoot",
    ),
    Peer(
        "surefoot DataLoader",
        "with_surefoot",
        "from_loader",
        like=fused,
        within=1e-5,
        spares=True,
        package="surefoot",
    ),
    Peer("Ignite", "with_ignite", "ignite", package="pytorch-ignite"),
    Peer("Fabric", "with_lightning", "fabric", package="lightning"),
    Peer("Accelerate", "with_accelerate", "accelerate", package="accelerate"),
    Peer("torchtnt", "with_torchtnt", "torchtnt", package="torchtnt"),
    Peer("HF Trainer", "with_transformers", "hf_trainer", like=fused, package="transformers"),
    Peer("Lightning", "with_lightning", "lightning_trainer", package="lightning"),
    Peer(
        "Keras", "with_keras", "keras_fit", within=1e-5, package="keras"
    ),  # its own AdamW and clipping
)


@dataclass(frozen=True)
class Outcome:
    """What a loop made of a training."""

    losses: Tensor  # of each step
    weights: Tensor  # at the end, all in one
    step_s: list[float]  # of each window


def outcome(
    loop: Loop,
    work: Work,
    *,
    steps: int,
    loader: bool = False,
    spares: bool = False,
    kept: bool = False,
    now: Callable[[], float] = perf_counter,
) -> Outcome:
    """Train once, with what is printed dropped; losses are `kept` or, to lose no time, not."""
    with TemporaryDirectory() as place, redirect_stdout(StringIO()):
        training = Training(
            work,
            steps,
            Path(place),
            loader=loader,
            spares=spares,
            now=now,
            losses=[] if kept else None,
        )
        model = loop(training)
    weights = torch.cat([held.detach().flatten() for held in model.parameters()])
    return Outcome(torch.stack(training.losses or [torch.empty(())]), weights, training.step_s)


def differs(peer: Peer, loop: Loop, work: Work, *, steps: int, loader: bool) -> str | None:
    """In what the peer's training is not that of the plain loop, in words; None where it is the
    same.
    """
    made = partial(outcome, work=work, steps=steps, loader=loader, kept=True)
    found, expected = made(loop), made(peer.like, spares=peer.spares)
    if len(found.losses) != steps:
        return f"{len(found.losses)} losses in {steps} steps"
    apart = ((found.losses - expected.losses).abs() / expected.losses.abs()).max().item()
    moved = ((found.weights - expected.weights).norm() / expected.weights.norm()).item()
    if apart <= peer.within and moved <= peer.within:
        return None
    return f"losses differ by up to {apart:.1e} and the weights at the end by {moved:.1e}, allowed is {peer.within:.0e}"
