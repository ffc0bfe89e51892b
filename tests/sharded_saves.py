"""Saves by several ranks inside one process: they take turns, so that every order of what happens
on the disk can be made.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch

from surefoot.checkpoint import Checkpoint, Store
from surefoot.checkpoint.manifest import Pieces, bounds
from surefoot.checkpoint.writer import SaveMessages, save_following, save_leading
from surefoot.errors import CheckpointError


class Messages:
    """A mailbox for threads."""

    def __init__(self) -> None:
        self.held: dict[str, str] = {}
        self.lock = threading.Lock()

    def set(self, key: str, value: str) -> None:
        with self.lock:
            self.held[key] = value

    def get(self, key: str) -> bytes:
        with self.lock:
            return self.held[key].encode()

    def check(self, keys: list[str]) -> bool:
        with self.lock:
            return all(key in self.held for key in keys)

    def delete_key(self, key: str) -> bool:
        with self.lock:
            return self.held.pop(key, None) is not None


class PendingError(Exception):
    """A rank has done its part and would wait now for rank 0."""


class UntilItWaits:
    """The mailbox of a rank that stops where it would wait for the outcome."""

    def __init__(self, messages: Messages) -> None:
        self.messages = messages

    def check(self, keys: list[str]) -> bool:
        if not self.messages.check(keys) and keys[0].endswith("/outcome"):
            raise PendingError
        return self.messages.check(keys)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.messages, name)


class Turns(Messages):
    """Rank 0's mailbox: the others do their part when it has said "begin", or (`late`) when it
    waits for them.
    """

    def __init__(self, others: Callable[[], None], *, late: bool, died: Callable[[], None]) -> None:
        super().__init__()
        self.others = others
        self.late = late
        self.died = died

    def set(self, key: str, value: str) -> None:
        super().set(key, value)
        if key.endswith("/begin") and not self.late:
            self.others()

    def check(self, keys: list[str]) -> bool:
        if "/piece-" in keys[0] and not super().check(keys):
            if self.late:
                self.late = False
                self.others()
            else:
                self.died()  # nobody will ever write this message
        return super().check(keys)


def whole(step: int, *, version: int = 0) -> Checkpoint:
    """A checkpoint as it is read: five rows over the ranks, a buffer and a count on all of them."""
    generator = torch.Generator().manual_seed(1000 * version + step)
    model = {
        "weight": torch.randn(5, 2, generator=generator),
        "mean": torch.randn(3, generator=generator),
    }
    optimizer = {
        "weight/momentum": torch.randn(5, 2, generator=generator),
        "weight/step": torch.tensor(float(step)),
    }
    files = {"model": model, "optimizer": optimizer, "state": {"rows": torch.ones(1)}}
    return Checkpoint(step, files, {"loss": 0.1 * step, "v": version}, (10, "ab"))


def of_rank(contents: Checkpoint, place: int, count: int) -> Checkpoint:
    """What one of several ranks has of a checkpoint, to save it."""
    start, stop = bounds(5, place, count)
    names = {"model": "weight", "optimizer": "weight/momentum"}
    pieces = Pieces(
        place,
        count,
        {file: {name: (5, 2)} for file, name in names.items()},
        {
            file: {name: contents.tensors(file)[name][start:stop].clone()}
            for file, name in names.items()
        },
    )
    if place > 0:
        return Checkpoint(contents.step, {}, pieces=pieces)
    files = {
        file: {name: held for name, held in tensors.items() if name != names.get(file)}
        for file, tensors in contents.files.items()
    }
    return Checkpoint(contents.step, files, contents.state, contents.log, pieces)


def save_by_turns(
    stores: list[Store],
    contents: Checkpoint,
    *,
    late: bool = False,
    died: Callable[[], None] = lambda: None,
    survived: tuple[type[BaseException], ...] = (),
) -> list[CheckpointError | None]:
    """Save a checkpoint by as many ranks as there are stores; what each of the others raised, once
    rank 0 has returned or raised.

    `survived` is what may befall another rank while rank 0 goes on until it waits for it, which
    calls `died`.
    """
    count = len(stores)
    attempt = 1

    def others() -> None:
        for place in range(1, count):
            board = SaveMessages(UntilItWaits(messages), save=attempt)
            with suppress(PendingError, *survived):
                save_following(stores[place], of_rank(contents, place, count), board, rank=place)

    messages = Turns(others, late=late, died=died)
    try:
        save_leading(
            stores[0],
            of_rank(contents, 0, count),
            SaveMessages(messages, save=attempt),
            protected=(),
        )
    except CheckpointError as problem:
        if "outcome" not in "".join(messages.held):
            raise
        said = [
            _outcome(stores[place], contents, messages, place, count) for place in range(1, count)
        ]
        return [problem, *said]
    return [
        None,
        *(_outcome(stores[place], contents, messages, place, count) for place in range(1, count)),
    ]


def _outcome(
    store: Store, contents: Checkpoint, messages: Messages, place: int, count: int
) -> CheckpointError | None:
    """What a rank that has written its piece learns."""
    only = Messages()
    only.held = {key: text for key, text in messages.held.items() if key.endswith("/outcome")}
    try:
        save_following(store, Checkpoint(contents.step, {}), SaveMessages(only, save=1), rank=place)
    except CheckpointError as problem:
        return problem
    return None
