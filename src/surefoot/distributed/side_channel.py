"""Small values that ranks send each other on the CPU, so that no step on a device waits.

Every exchange carries the name of the call that a rank is in. If the names differ, the ranks do not
make the same calls: each rank that reads the exchange raises an error that says where all ranks
are. So a call on one rank is named, and no rank reads the values of another call.
"""

import json
import struct
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import DistError

from surefoot.errors import ConfigError
from surefoot.memory import equal_on_cpu

LEFT = "at the end of its loop"
"""The call of a rank that begins no further step."""
_NO_CALL = "at the start of the run, or between two steps"
_BY_USER = ("in run.", "in sf.", "in forward_backward", "in update")
# the same in each message, whatever call it is of
_NUMBERS = 6
_NAME_BYTES = 160
_FORMAT = f"{_NUMBERS}q{_NAME_BYTES}s"


class LeftAloneError(DistError):
    """Some ranks have left their loop, and others have not. The heartbeat names the ranks that
    left.
    """


class SideChannel:
    """The exchanges of this rank over a gloo group, in order. `call` is the call that the rank is
    in.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.rank = group.rank()
        self.size = group.size()
        self.call = ""
        self.posted: deque[Message] = deque()  # whose answers this rank has not read

    @contextmanager
    def during(self, call: str, *, meet: bool = False) -> Iterator[None]:
        """Name the exchanges of this context. With `meet`, wait first until all ranks are in this
        call.
        """
        before = self.call
        self.call = call
        try:
            if meet:
                self.read(self.post())
            yield
        finally:
            self.call = before

    def post(self, numbers: Sequence[int] = (), *, call: str = "") -> "Message":
        """Send numbers to all ranks, without waiting. Collective."""
        message = Message(self, call or self.call, numbers)
        self.posted.append(message)
        return message

    def read(self, until: "Message") -> "Message":
        """Wait for a message of every rank, and return the message. Raises `ConfigError` if a rank
        was in another call, then or earlier.
        """
        while until in self.posted:
            self.posted.popleft().check()
        return until

    def agree(self, number: int) -> bool:
        """Return whether all ranks pass the same integer. Collective, and waits for the other
        ranks.
        """
        headers = self.read(self.post([number])).headers
        return all(equal_on_cpu(headers[0], header) for header in headers[1:])

    def gathered(self, value: Any) -> list[Any]:
        """Return the JSON value of every rank, by rank. Collective, and waits for the other
        ranks.
        """
        payload = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        message = self.read(self.post([len(payload)]))
        lengths = [length for length, *_ in message.numbers()]
        longest = max(lengths)
        received = [torch.empty(longest, dtype=torch.uint8) for _ in range(self.size)]
        padded = torch.nn.functional.pad(payload, (0, longest - len(payload)))
        dist.all_gather(received, padded, group=self.group)
        values = []
        for text, length in zip(received, lengths, strict=True):
            values.append(json.loads(bytes(text[:length].numpy())))
        return values


class Message:
    """The name of a call and some numbers, of every rank. All messages have the same size, so that
    the messages of different calls meet.
    """

    def __init__(self, channel: SideChannel, call: str, numbers: Sequence[int]) -> None:
        unused = [0] * (_NUMBERS - len(numbers))
        packed = struct.pack(_FORMAT, *numbers, *unused, call.encode())
        header = torch.frombuffer(bytearray(packed), dtype=torch.uint8)
        self.headers = [*torch.empty(channel.size, len(header), dtype=torch.uint8)]  # by rank
        # `dist.all_gather` takes 50 us more, in each step
        self.work = channel.group.allgather([self.headers], [header])

    def numbers(self) -> list[list[int]]:
        """Return the numbers by rank, after `check`."""
        numbers = []
        for header in self.headers:
            *numbers_of_rank, _ = struct.unpack(_FORMAT, bytes(header.numpy()))
            numbers.append(numbers_of_rank)
        return numbers

    def check(self) -> None:
        """Wait for the other ranks. Raises `ConfigError` if a rank is in another call."""
        self.work.wait()
        names = [header[-_NAME_BYTES:] for header in self.headers]
        if not all(equal_on_cpu(names[0], name) for name in names[1:]):
            texts = [bytes(name.numpy()).rstrip(b"\0") for name in names]
            refuse_different_calls([text.decode(errors="ignore") for text in texts])


def refuse_different_calls(calls: Sequence[str]) -> None:
    """Raise the error of ranks in different calls, which are given by rank."""
    others = [call for call in calls if call != LEFT]
    if len(others) < len(calls) and not any(call.startswith(_BY_USER) for call in others):
        raise LeftAloneError("some ranks have left their loop, and others have not")
    ranks_in: dict[str, list[int]] = {}
    for rank, call in enumerate(calls):
        ranks_in.setdefault(call, []).append(rank)
    places = [f"{_ranks(ranks)} {call or _NO_CALL}" for call, ranks in ranks_in.items()]
    raise ConfigError(
        "different-calls-on-ranks",
        problem=f"the ranks are in different calls: {', '.join(places)}",
        reason="every rank waits in such a call until all ranks make it",
        remedy="make the call on every rank, not below `if run.rank == 0:`, and equally often",
        calls=[*calls],
    )


def _ranks(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]} is"
    if len(ranks) == ranks[-1] - ranks[0] + 1 and len(ranks) > 2:
        return f"ranks {ranks[0]} to {ranks[-1]} are"
    texts = [str(rank) for rank in ranks[:4]]
    if len(ranks) > 4:
        texts.append("...")
    return f"ranks {', '.join(texts)} are"
