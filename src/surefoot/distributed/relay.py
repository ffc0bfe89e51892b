"""Tensors that go from rank to rank, so that the passes of one rank start from what those of the
rank before it have left.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from surefoot.distributed.rendezvous import wait_for_message


class Relay:
    """The exchange of tensors of the same shapes on all ranks: each rank receives before its first
    pass and sends after its last one, and the last rank shares the result.
    """

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size
        self.sent: Tensor | None = None  # until the next rank has it
        self.work: dist.Work | None = None

    def receive(self, tensors: Sequence[Tensor]) -> None:
        """Overwrite the tensors with those of the rank before this one. The host waits for it only
        on the CPU.
        """
        if self.rank > 0:
            data = _bytes_of(tensors)
            work = dist.irecv(data, src=self.rank - 1)
            assert work is not None  # this rank is in the group
            wait_for_message(work, data)
            _write(tensors, data)

    def send(self, tensors: Sequence[Tensor]) -> None:
        """Send the tensors to the next rank, without waiting for it."""
        if self.rank < self.size - 1:
            self._finish()
            self.sent = _bytes_of(tensors)
            self.work = dist.isend(self.sent, dst=self.rank + 1)

    def share(self, tensors: Sequence[Tensor]) -> None:
        """Overwrite the tensors with those of the last rank. Collective."""
        self._finish()
        data = _bytes_of(tensors)
        dist.broadcast(data, src=self.size - 1)
        _write(tensors, data)

    def _finish(self) -> None:
        if self.work is not None and self.sent is not None:
            wait_for_message(self.work, self.sent)
        self.work = self.sent = None


def _bytes_of(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([tensor.reshape(-1).view(torch.uint8) for tensor in tensors])


def _write(tensors: Sequence[Tensor], data: Tensor) -> None:
    parts = torch.split(data, [tensor.nbytes for tensor in tensors])
    for tensor, part in zip(tensors, parts, strict=True):
        # a part may begin at any byte, and numbers only at a multiple of their size
        tensor.copy_(part.clone().view(tensor.dtype).view_as(tensor))
