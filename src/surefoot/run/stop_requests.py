"""What ends a run before its time, or has it saved beside its timetable: told to this process, and agreed on by all ranks.

A signal, a time limit, and what a user's code asks for come to one process; all ranks act on them after the same step.
"""

from collections.abc import Mapping

from surefoot.distributed.world import Consensus, World
from surefoot.run.checkpointing import Checkpointing
from surefoot.run.signals import STOP, Signals
from surefoot.train.timer import Deadline

_ABOVE = 1 << 32  # every fingerprint of 32 bits


class StopRequests:
    """To stop and to save, in one session. One process agrees with itself at once, and nothing is exchanged."""

    def __init__(self, world: World, signals: Signals, saving: Checkpointing | None, *, limit_s: float | None) -> None:
        self.world, self.signals, self.saving = world, signals, saving
        self.agreement = Consensus(world, names=("signal", "stop", "save", "most", "least"))
        self.deadline = None if limit_s is None else Deadline(limit_s)
        self.run_stop = self.run_save = False  # by the user's code, here
        self.agreed_signal: int | None = None
        self.signal_rank = 0  # the first that has had it
        self.stop_agreed = self.save_agreed = False
        self.out_of_time = self.save_sent = False  # here

    @property
    def ended_by(self) -> int | None:
        """The signal that all ranks know of; where there is one process, the one that has come."""
        return self.signals.stop if self.world.size == 1 else self.agreed_signal

    @property
    def save(self) -> bool:
        """Whether all ranks save after this step."""
        return self._save_wanted if self.world.size == 1 else self.save_agreed

    def stopping(self, *, trainable: int) -> bool:
        """Whether no further step is to be made; asked once before each step, by all ranks, with what each trains (`alike`)."""
        if self.ended_by is not None or self.stop_agreed:
            return True
        saving_s = 0.0 if self.saving is None else self.saving.longest_s
        near = self.deadline is not None and self.deadline.near(keep_free_s=2 * saving_s + 1)
        self.out_of_time = self.out_of_time or near
        stop_requested = self.run_stop or near
        if self.world.size == 1:
            return stop_requested
        sends_save = self._save_wanted and not self.save_sent
        self.save_sent |= sends_save  # once: until it is done the wish stands
        own = {"signal": self._own_signal, "stop": int(stop_requested), "save": int(sends_save)}
        self._receive(self.agreement.exchange(**own, most=trainable, least=_ABOVE - trainable))
        return self.ended_by is not None or self.stop_agreed

    def same_on_all_ranks(self) -> bool:
        """Whether all ranks came to this step with the same number; only a rank whose own has changed asks, and waits."""
        largest = self.agreement.peek()
        return self.world.size == 1 or largest["most"] + largest["least"] == _ABOVE

    def stop_requested(self) -> bool:
        """Whether a signal has come, on any rank; asked by all of them, where a step is given up for it."""
        self._receive(self.agreement.exchange(signal=self._own_signal))
        return self.agreed_signal is not None

    def settle(self) -> None:
        """Hear at the end of all steps what was still on its way; collective."""
        self._receive(self.agreement.now(signal=self._own_signal))

    def saved(self) -> None:
        """Take notice that a save has begun: whatever was wished for until now is granted."""
        self.signals.save = self.run_save = self.save_sent = self.save_agreed = False

    @property
    def stopped_by(self) -> str | None:
        """Which signal ended the session, and on which rank where this is not the one that speaks."""
        if self.ended_by is None:
            return None
        return STOP[self.ended_by] + (f" on rank {self.signal_rank}" if self.signal_rank else "")

    @property
    def _own_signal(self) -> int:
        """The number of the signal that this rank has had, and in its remainder the rank: of all ranks the first is the largest."""
        from_last = self.world.size - 1 - self.world.rank
        return 0 if self.signals.stop is None else self.signals.stop * self.world.size + from_last

    @property
    def _save_wanted(self) -> bool:
        """Whether this rank would save after this step: for a signal, the user's code, the clock."""
        return self.saving is not None and (self.signals.save or self.run_save or self.saving.wanted())

    def _receive(self, agreed: Mapping[str, int]) -> None:
        number, before_last = divmod(agreed["signal"], self.world.size)
        if number and self.agreed_signal in (None, number):
            rank = self.world.size - 1 - before_last
            self.signal_rank = rank if self.agreed_signal is None else min(rank, self.signal_rank)
            self.agreed_signal = number
        self.stop_agreed = self.stop_agreed or bool(agreed["stop"])
        self.save_agreed = self.save_agreed or bool(agreed["save"])
