"""What all ranks must do at the same step: told by each at one step, known to all at the next, and waited for by none.

A signal reaches one process, a clock runs on each, a user's code may call `run.stop()` anywhere. The largest of what the ranks
say counts. It travels on the CPU, beside whatever the device is doing.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist

from surefoot.distributed.world import World


class Agreement:
    """Whole numbers from 0 on, by name; one process agrees with itself at once.

    >>> agreement = Agreement(World(torch.device("cpu")), names=("stop", "save"))
    >>> agreement.exchange(stop=15)
    {'stop': 15, 'save': 0}
    """

    def __init__(self, world: World, *, names: Sequence[str]) -> None:
        self.world, self.names = world, tuple(names)
        self.told: torch.Tensor | None = None
        self.work: dist.Work | None = None

    def exchange(self, **own: int) -> dict[str, int]:
        """Tell the others, and hear what all ranks together said at the last call (0 at the first); collective."""
        heard = self._heard()
        told = [own.get(name, 0) for name in self.names]
        if self.world.side is None:
            return dict(zip(self.names, told, strict=True))
        self.told = torch.tensor(told)
        self.work = dist.all_reduce(self.told, op=dist.ReduceOp.MAX, group=self.world.side, async_op=True)
        return heard

    def now(self, **own: int) -> dict[str, int]:
        """As `exchange`, but wait for what the others say in this very call; what was still on its way is in it too."""
        before = self.exchange(**own)
        after = self._heard() if self.world.side is not None else before
        return {name: max(before[name], after[name]) for name in self.names}

    def peek(self) -> dict[str, int]:
        """What all ranks say in the last exchange, waited for by this one alone; the next call hears it too."""
        if self.work is None or self.told is None:
            return dict.fromkeys(self.names, 0)
        self.work.wait()
        return dict(zip(self.names, self.told.tolist(), strict=True))

    def _heard(self) -> dict[str, int]:
        heard = self.peek()
        self.work = self.told = None
        return heard
