"""Requests to stop or save a run early, on which all ranks act after the same step.

A request that every rank makes in the same step takes effect after this step, as in a single
process. A request of some ranks takes effect one step later: the ranks send each other their
requests between two steps, and a rank without a request does not wait for the result.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

from surefoot.distributed.world import Consensus, World
from surefoot.run.checkpointing import Checkpointing
from surefoot.run.signals import STOP, Signals
from surefoot.train.timer import Deadline


class StopRequests:
    """The requests to stop and save in one session. A single process needs no communication."""

    def __init__(
        self,
        world: World,
        signals: Signals,
        checkpointing: Checkpointing | None,
        *,
        limit_s: float | None,
    ) -> None:
        self.world = world
        self.signals = signals
        self.checkpointing = checkpointing
        self.agreement = Consensus(world, names=("signal", "stop", "save", "change", "trainable"))
        self.deadline = None if limit_s is None else Deadline(limit_s)
        # of this rank
        self.run_stop = False  # by user code
        self.run_save = False  # by user code
        self.out_of_time = False
        self.save_sent = False  # a request remains until the save, and is sent once
        self.change = False  # of settings after this step, by the body of all ranks
        self.change_file: Path | None = None  # the request of another process, on rank 0
        self.change_requested = False  # rank 0 has seen that file
        # of all ranks
        self.agreed_signal: int | None = None
        self.signal_rank = 0  # the lowest rank that received the signal
        self.stop_agreed = False
        self.save_agreed = False
        self.change_agreed = False

    @property
    def ended_by(self) -> int | None:
        """The signal agreed on by all ranks, or the received signal of a single process, or
        None.
        """
        return self.signals.stop if self.world.size == 1 else self.agreed_signal

    @property
    def save(self) -> bool:
        """True if all ranks save after this step."""
        return self._save_wanted if self.world.size == 1 else self.save_agreed

    def stopping(self, *, step: int, trainable: int) -> bool:
        """Return True if `step` does not follow. All ranks call this once per step with a
        fingerprint of their trained parameters.
        """
        if self.world.size == 1:
            return self.on_this_rank() or self.change or self.change_requested
        if self.ended_by is not None or self.stop_agreed or self.change_agreed:
            return True
        stop_requested = self.on_this_rank()
        save_requested = self._save_wanted and not self.save_sent
        self.save_sent = self.save_sent or save_requested
        requests = self._requests(stop=stop_requested, save=save_requested)
        call = f"at the beginning of step {step}"
        self._receive(self.agreement.exchange(call=call, **requests, trainable=trainable))
        if stop_requested or save_requested or self.change or self.change_requested:
            of_ranks = self.agreement.peek()
            self.stop_agreed |= all(of_ranks["stop"])
            self.save_agreed |= all(of_ranks["save"])
            self.change_agreed |= all(of_ranks["change"])
        return self.ended_by is not None or self.stop_agreed or self.change_agreed

    def look_for_change(self) -> None:
        """Stop after this step if another process has asked for a change of settings."""
        if self.change_file is not None and self.change_file.exists():
            self.change_requested = True

    @property
    def has_change(self) -> bool:
        """True if the loop of all ranks ends because settings change."""
        if self.world.size == 1 and self.change_requested:
            return True
        return self.change or self.change_agreed

    def on_this_rank(self) -> bool:
        """Return True if this rank has received a signal or a request to stop, without
        communication.
        """
        if self.deadline is not None and not self.out_of_time:
            save_s = 0.0 if self.checkpointing is None else self.checkpointing.longest_s
            self.out_of_time = self.deadline.near(keep_free_s=2 * save_s + 1)
        return self.signals.stop is not None or self.run_stop or self.out_of_time

    def same_on_all_ranks(self) -> bool:
        """Return True if all ranks sent the same `trainable` fingerprint. A rank calls this only if
        its fingerprint changed.
        """
        return len(set(self.agreement.peek()["trainable"])) == 1

    def stop_requested(self) -> bool:
        """Return True if a rank has received a signal. All ranks call this method during an
        interruptible evaluation.
        """
        self._receive(self.agreement.exchange(signal=self.signals.stop or 0))
        return self.agreed_signal is not None

    def agree(self, call: str = "") -> None:
        """Exchange the requests made until now, and wait for all ranks. In an evaluation or a
        sample, rank 0 alone may call the user's code. Collective.
        """
        if self.world.size > 1:
            requests = self._requests(stop=self.on_this_rank(), save=self._save_wanted)
            self._receive(self.agreement.exchange(call=call, **requests))
            of_ranks = self.agreement.take()
            self._receive(of_ranks)
            self.save_agreed |= any(of_ranks["save"])

    def saved(self) -> None:
        """Reset all save requests when a save begins."""
        self.signals.save = False
        self.run_save = False
        self.save_sent = False
        self.save_agreed = False

    @property
    def stopped_by(self) -> str | None:
        """The signal that ended the session, with its rank if this is not rank 0, or None."""
        if self.ended_by is None:
            return None
        name = STOP[self.ended_by]
        return f"{name} on rank {self.signal_rank}" if self.signal_rank else name

    @property
    def _save_wanted(self) -> bool:
        if self.checkpointing is None:
            return False
        return self.signals.save or self.run_save or self.checkpointing.wanted()

    def _requests(self, *, stop: bool, save: bool) -> dict[str, int]:
        return {
            "signal": self.signals.stop or 0,
            "stop": int(stop),
            "save": int(save),
            "change": int(self.change or self.change_requested),
        }

    def _receive(self, agreed: Mapping[str, Sequence[int]]) -> None:
        number = max(agreed["signal"])
        if number and self.agreed_signal in (None, number):
            rank = agreed["signal"].index(number)
            if self.agreed_signal is None or rank < self.signal_rank:
                self.signal_rank = rank
            self.agreed_signal = number
        self.stop_agreed |= any(agreed["stop"])
        self.change_agreed |= any(agreed["change"])
        # what every rank has requested is saved already
        self.save_agreed |= any(agreed["save"]) and not all(agreed["save"])
