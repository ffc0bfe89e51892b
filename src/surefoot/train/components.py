"""The parts of a run, assembled before its first step."""

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from hashlib import sha256
from itertools import zip_longest
from typing import Any

import torch

from surefoot.checkpoint.format import Checkpoint
from surefoot.checkpoint.reader import interprets
from surefoot.checkpoint.snapshot import Snapshot
from surefoot.config.accepted_changes import ANOTHER_RUN, FROM_ITS_WEIGHTS
from surefoot.config.durations import Length
from surefoot.config.setting_change import SCHEDULE, SettingChange, began_since, is_journal_of
from surefoot.config.tree import flat
from surefoot.data.data_values import DataValues
from surefoot.data.pipeline import DataPipeline
from surefoot.distributed.sync_batch_norm import has_synchronized_norms
from surefoot.distributed.world import World, deterministic_kernels
from surefoot.errors import CheckpointError
from surefoot.optim.build import RunOptimizer
from surefoot.optim.clipping import clear
from surefoot.optim.group_rates import recorded_rates
from surefoot.tracking.change_journal import CHANGES
from surefoot.tracking.console import WIDTH, Screen, TextLog
from surefoot.tracking.run_directory import RunDirectory, machine
from surefoot.train.compile import Layout
from surefoot.train.loop import State, Task
from surefoot.train.meter import Meter
from surefoot.train.plan import Plan
from surefoot.train.run_identity import (
    has_same_samples,
    machine_changes,
    printed_through,
    refuse_another_length,
    refuse_differences,
    refuse_other_data,
    with_changed,
)
from surefoot.train.run_settings import RunSettings
from surefoot.train.scorer import Evaluator
from surefoot.train.state_dict import Bases, RunState, UserState, packed, restore
from surefoot.train.timer import Clock


@dataclass(kw_only=True)
class Components:
    """The parts of one run. Steps change `run_state`."""

    settings: RunSettings
    tasks: tuple[Task, ...]  # of each segment of the plan
    run_state: RunState
    pipeline: DataPipeline
    evaluator: Evaluator
    plan: Plan
    world: World
    layout: Layout
    architecture: dict[str, str]  # each model's repr: types and settings of its layers
    directory: RunDirectory | None
    console: Screen | None
    text_log: TextLog | None
    computed_again: str | None  # description of the checkpointed blocks
    accept_change: tuple[str, ...]  # names of `config.accepted_changes.CHANGES`, in this session
    fingerprints: dict[str, Any] = field(default_factory=dict)  # of data, code and the first loss
    changes: tuple[SettingChange, ...] = ()  # of settings, by the journal of the run
    settings_begin: int = 0  # the step from which on the settings hold
    of_program: dict[str, Any] = field(default_factory=dict)  # its values of `changeable` settings
    skips: str | None = None  # the range of steps that this session passes over

    @property
    def device(self) -> torch.device:
        return self.world.device

    @property
    def state(self) -> State:
        return self.run_state.state

    @property
    def task(self) -> Task:
        """The task of the next step."""
        return self.tasks[self.plan.segment_of(self.state.step)]

    @property
    def length(self) -> Length:
        return self.plan.times.length

    @property
    def compiled(self) -> bool:
        return self.plan.compiles

    @property
    def out_of_patience(self) -> bool:
        """True if early stopping has ended the run."""
        return self.run_state.out_of_patience

    @property
    def finished(self) -> bool:
        """True if the run has reached its length or early stopping has ended it, and no change of
        settings begins here.
        """
        if self.state.step == self.plan.timeline.next_change:
            return False
        return self.run_state.is_finished(self.length.steps)

    @property
    def is_at_change(self) -> bool:
        """True if other settings hold in the next step, for which the run is built again."""
        return self.state.step == self.plan.timeline.until

    def recorded_rates(self) -> dict[str, float]:
        """Return the learning rates and momenta of the latest step, by their names in a record."""
        rates = {name: trained.rates for name, trained in self.state.optimizers.items()}
        has_group_factors = self.task.group_factors is not None
        return recorded_rates(rates, has_group_factors=has_group_factors)

    def packed(
        self,
        bases: Bases | None = None,
        *,
        evaluation_due: bool = False,
        ended: bool = False,
        first_scores: Mapping[str, float] | None = None,
        scores: Mapping[str, float] | None = None,
        for_this_rank: bool = False,
    ) -> Checkpoint:
        """Return a checkpoint's contents: a copy of the run state, and the facts that identify the
        run and the machine.

        Frozen tensors that older checkpoints have are left out if `bases` names these checkpoints.
        With `for_this_rank`, only this rank can restore the checkpoint.
        """
        tape = None
        if self.pipeline.tape is not None:
            batch_size = self.pipeline.sizes.batch_size
            tape = self.pipeline.tape.facts(self.state.step, batch_size)
        return packed(
            self.run_state,
            main=self.world.is_main,
            bases=bases,
            for_this_rank=for_this_rank,
            identity=dict(self.plan.identity),
            architecture=self.architecture,
            splits=dict(self.plan.splits),
            fingerprints=self.fingerprints,
            evaluation_due=evaluation_due,
            ended=ended,
            first_scores=_as_text(first_scores or {}),
            scores=_as_text(scores or {}),
            machine=self.machine(),
            stopped_early=self.out_of_patience,
            tape=tape,
            changes=self._last_change(),
            whole_epochs=self.pipeline.whole_epochs,
        )

    def _last_change(self) -> dict[str, int | str] | None:
        """Return the number and the hash of the last change that holds in the steps of this
        session.
        """
        number = 0
        digest = ""
        for change in self.changes:
            if change.from_step <= self.settings_begin:
                number = change.number
                digest = change.sha256
        return {"number": number, "sha256": digest} if number > 0 else None

    @interprets
    def changes_since(self, checkpoint: Checkpoint) -> list[SettingChange]:
        """Return the changes that hold in the next step and did not hold in the step of a
        checkpoint. Raises `CheckpointError` if the journal is not that of the checkpoint.
        """
        last = checkpoint.saved.changes
        number = 0 if last is None else int(last["number"])
        if not is_journal_of(last, checkpoint.step, self.changes):
            raise CheckpointError(
                "journal-of-another-run",
                problem=f"step-{checkpoint.step:08d} was saved after change {number} of settings, and"
                f" {CHANGES} says something else",
                reason="the journal says which settings the run had at which step",
                remedy="restore the file from a copy of the run",
                number=number,
            ).inside(f"cannot resume {self.where(checkpoint)}")
        since = []
        for change in began_since(last, checkpoint.step, self.changes):
            is_other = change.was != change.now or change.setting == SCHEDULE
            if change.from_step <= checkpoint.step and is_other:
                since.append(change)
        return since

    def snapshot(self) -> Snapshot:
        """Return a snapshot of the whole run: `with parts.snapshot():` leaves the run bit for bit as
        it was, between two steps.

        What a checkpoint holds is kept in one, in the memory of each rank.
        """
        run_state = self.run_state
        state = run_state.state
        averages = {f"average of {name}": each.model for name, each in state.ema_models.items()}
        # before `packed`, which brings the buffers of averages up to date
        before = Snapshot(
            state.models | averages,
            self.task.loss,
            user_state=run_state.user_state.objects,
            parameters=state.parameters,
            keep=True,
            weights=False,
        )
        # these refer to values of the step that is under way, which a checkpoint copies
        before.keep_objects(
            meter=run_state.meter,
            epoch=run_state.meter.epoch,
            clock=run_state.clock,
            user_state=run_state.user_state,
        )
        saved = replace(
            run_state,
            meter=Meter(),
            clock=Clock(),
            user_state=UserState(dict(run_state.user_state.objects)),
            data_values=DataValues({}),
        )
        checkpoint = replace(self, run_state=saved).packed(for_this_rank=True)
        data_values = run_state.data_values.state()
        identity = self.plan.identity

        def restore_saved() -> None:
            clear(state.parameters)
            state.buffers.undo()
            self.compute_as(identity)
            restore(saved, checkpoint, where="the state before the trial")
            if run_state.data_values.state() != data_values:
                run_state.data_values.load_state(data_values)

        before.keep_further(restore_saved)
        return before

    def make_ready(self) -> None:
        """Run a warm-up pass if several ranks share a step (see `parallel_check.make_ready`).
        Collective.
        """
        if self.world.size > 1:
            from surefoot.train.parallel_check import make_ready

            make_ready(
                self.task,
                self.state,
                self.pipeline.first,
                user_state=self.run_state.user_state.objects,
                world=self.world,
            )

    def machine(self) -> dict[str, Any]:
        """Return the facts about hardware, software and parallelism that bitwise-equal results
        depend on.

        `exact` is True if another number of ranks computes the same bits. `shards` is the number of
        ranks that take turns.
        """
        is_exact = self.task.ranks.exact
        if has_synchronized_norms(self.state.models.values()):
            is_exact = False
        if self.plan.parallel.kind == "fsdp":
            # what is computed by shards
            has_16_bits = any(weight.element_size() < 4 for weight in self.state.parameters)
            if has_16_bits or self.settings.clip.startswith(("adaptive", "value")):
                is_exact = False
        return machine(self.device, deterministic=self.settings.deterministic) | {
            "ranks": self.world.size,
            "parallel": self.plan.parallel.kind,
            "shards": self.pipeline.shares[0].step,
            "exact": is_exact,
        }

    def compared(self) -> dict[str, Any]:
        """Return the settings that must be equal on every rank, by dotted name."""
        compared = flat(self.plan.identity)
        for name, text in self.architecture.items():
            compared[f"model {name}"] = sha256(text.encode()).hexdigest()[:12]
        compared["frozen"] = ", ".join(self.state.trainable.state()["frozen"])
        compared["stop_after"] = self.plan.times.stop_step
        return compared

    def where(self, checkpoint: Checkpoint) -> str:
        """Return the name of a checkpoint of this run, for messages."""
        step = f"step-{checkpoint.step:08d}"
        if self.directory is None:
            return step
        return f"{self.directory.shown} at {step}"

    @interprets
    def refuse_other_settings(self, checkpoint: Checkpoint) -> None:
        """Raise `CheckpointError` if a setting would change the run of a checkpoint, or if this run
        was built before that run began.
        """
        where = self.where(checkpoint)
        saved = dict(checkpoint.saved.identity)
        now = json.loads(json.dumps(self.plan.identity))
        saved = with_changed(saved, now, self.changes_since(checkpoint))
        if now["init_from"] is None:
            # these weights were loaded at step 0 and are not needed again
            saved["init_from"] = None
            saved.pop("init_optimizer", None)
        if "data" in self.accept_change and has_same_samples(saved, now):
            saved["data"] = now["data"]
            if saved.get("plateau") and now.get("plateau"):
                saved["plateau"] = saved["plateau"] | {"scored": now["plateau"]["scored"]}
        began_steps = saved["schedule_of_steps"]
        if began_steps != now["schedule_of_steps"]:
            raise CheckpointError(
                "run-began-meanwhile",
                problem=f"a run of {began_steps} steps began in this directory after this Run was"
                " built",
                reason="it decides the learning rates",
                remedy="build the Run again",
                steps=began_steps,
            ).inside(f"cannot resume {where}")
        refuse_other_data(saved, now, where=where, step=checkpoint.step)
        refuse_another_length(
            saved,
            now,
            self.length,
            schedule=self.plan.schedule,
            step=checkpoint.step,
            where=where,
        )
        refuse_differences(saved | {"length": now["length"]}, now, where=where)

    def follow_trainable(self) -> None:
        self.state.trainable.follow()
        self.task.ranks.follow_trainable()

    def compute_as(self, identity: Mapping[str, Any]) -> None:
        """Use the precision, memory format and compilation of another run where the settings are
        "auto".
        """
        followed = dict(self.plan.identity)
        for name in ("precision", "channels_last", "compile"):
            if getattr(self.settings, name) == "auto":
                followed[name] = identity[name]
        plan = replace(
            self.plan,
            precision=followed["precision"],
            channels_last=followed["channels_last"],
            compiles=followed["compile"],
            identity=followed,
        )
        self.plan = plan
        self.run_state.precision.name = plan.precision
        self.layout.channels_last = plan.channels_last
        self.evaluator.compiles = plan.compiles

    @interprets
    def refuse_another_architecture(self, checkpoint: Checkpoint) -> None:
        """Raise `CheckpointError` if a model's repr differs from the checkpoint's. Does nothing if
        the torch version differs.
        """
        if checkpoint.saved.machine["torch"] != torch.__version__:
            return  # its modules may have another repr
        changes = self.changes_since(checkpoint)
        for name, text in self.architecture.items():
            text_before = checkpoint.saved.architecture.get(name, "")
            if printed_through(changes, text) == printed_through(changes, text_before):
                continue
            lines = text.splitlines()
            lines_before = text_before.splitlines()
            for line_before, line in zip_longest(lines_before, lines, fillvalue="nothing"):
                if line_before != line:
                    layer_before = line_before.strip().removesuffix("(")
                    layer = line.strip().removesuffix("(")
                    raise CheckpointError(
                        "model-changed",
                        problem=f"the model had {layer_before} and now has {layer}",
                        reason="the model of a run cannot change",
                        remedy=[
                            ANOTHER_RUN,
                            FROM_ITS_WEIGHTS,
                        ],
                    ).inside(f"cannot resume {self.where(checkpoint)}")

    @interprets
    def notes(self, checkpoint: Checkpoint) -> list[str]:
        """Return warnings about differences that a resume allows: another machine, and splits with
        other data.
        """
        saved = checkpoint.saved
        notes = []
        other_machine = machine_changes(saved.machine, self.machine())
        if other_machine:
            notes.append(
                f"{'; '.join(other_machine)}; training continues, equal up to rounding and no"
                " longer bit for bit"
            )
        changed = _names_of_changed(saved.splits, self.plan.splits)
        # another machine may decode the same files to other bits
        if saved.fingerprints["machine"] == self.fingerprints["machine"]:
            of_samples = _names_of_changed(
                saved.fingerprints["splits"], self.fingerprints["splits"]
            )
            changed += [name for name in of_samples if name not in changed]
        for name in changed:
            notes.append(
                f"the data of {name} has changed: its metrics are not comparable with earlier"
                " metrics"
            )
        return notes

    @contextmanager
    def numerics(self) -> Iterator[None]:
        """Apply the run's precision and determinism settings to torch; restore torch's settings at
        the end.
        """
        kernels: AbstractContextManager[None] = nullcontext()
        if self.settings.deterministic:
            kernels = deterministic_kernels(self.device)
        with self.run_state.precision.numerics(), kernels:
            yield

    def doing(self, what: str) -> None:
        """Report a possibly slow operation to the console and, through the heartbeat, to the other
        ranks.
        """
        self.world.heartbeat.busy(what)
        if self.console is not None:
            self.console.doing(what)

    @property
    def width(self) -> int:
        """The columns of a line on the console."""
        if self.console is None:
            return WIDTH
        return self.console.width

    def say(self, text: str) -> None:
        if self.console is not None:
            self.console.say(text)
        if self.text_log is not None:
            self.text_log.console.say(text)


def _names_of_changed(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return the names that both have, with other values."""
    return [name for name in now if name in before and now[name] != before[name]]


def _as_text(scores: Mapping[str, float]) -> dict[str, str]:
    return {name: repr(float(value)) for name, value in scores.items()}


def group_counts(optimizers: Mapping[str, RunOptimizer]) -> dict[str, int]:
    """Return the number of parameter groups of each optimizer."""
    return {name: len(each.optimizer.param_groups) for name, each in optimizers.items()}


def printed(model: torch.nn.Module) -> str:
    """Return a model's repr without memory addresses, and the names of its submodules in evaluation
    mode.
    """
    lines = [re.sub(r"0x[0-9a-f]+", "0x", repr(model))]
    for name, module in model.named_modules():
        if not module.training:
            lines.append(f"{name} in evaluation mode")
    return "\n".join(lines)
