"""The class `Run`, a training run."""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from itertools import chain
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn, Self

from torch import Tensor

from surefoot.checkpoint.format import Checkpoint
from surefoot.checkpoint.module_state import OtherModelError
from surefoot.config.keywords import attribute_error, known_keywords
from surefoot.config.setting import KeywordsDoc, ordered
from surefoot.config.user_code import refuse_training_at_import
from surefoot.data.dataset_checks import check_split
from surefoot.errors import (
    Command,
    ConfigError,
    at_boundary,
    cut_frames,
    ending_scripts,
    first_line,
)
from surefoot.run import messages
from surefoot.run.after import change_settings
from surefoot.run.build import build
from surefoot.run.components import RunComponents
from surefoot.run.history import OtherSettings
from surefoot.run.resume import start_from_init
from surefoot.run.samples import draw_sample, make_panels
from surefoot.run.session import Session
from surefoot.run.signals import Signals
from surefoot.tracking.numbered import built_again
from surefoot.train import state_dict
from surefoot.train.evaluate import Split, numbers
from surefoot.train.loop import State, Step
from surefoot.train.model_weights import warn_of_statistics
from surefoot.train.run_identity import differences
from surefoot.train.run_settings import RunSettings

if TYPE_CHECKING:
    from surefoot.tracking.panels_file import Panels


@ending_scripts
@known_keywords
@ordered
@dataclass(kw_only=True, eq=False, repr=False)
class Run(RunSettings):
    """One training run. Call `run.train()`, or write a loop over `run` or `run.steps()` inside
    `with run:`.

    The settings, `seed` and the step determine the result. A run resumes automatically if `run_dir`
    contains a checkpoint. Durations are strings with a unit: "200 steps", "2 epochs", "5%" of the
    run, and for `save_every` and `time_limit` also "90 min". `help(sf.Run)` and the settings page of
    the documentation describe all keywords.

    Raises `ConfigError` or `DataError` for invalid settings or data before files are written.

    >>> import torch, surefoot as sf
    >>> inputs = torch.linspace(-1, 1, 64)[:, None]
    >>> def loss(model, batch):
    ...     return (model(batch[0]) - batch[1]).square().mean()
    >>> run = Run(
    ...     model=lambda: torch.nn.Linear(1, 1),
    ...     loss=loss,
    ...     train_data=(inputs, 3 * inputs),
    ...     optimizer=sf.optim.sgd(lr=0.1),
    ...     batch_size=16,
    ...     length="2 epochs",
    ...     device="cpu",
    ...     console=False,
    ... )
    >>> with run:
    ...     for step in run.steps():
    ...         value = sf.forward_backward(
    ...             step
    ...         )  # `for step in run:` and `run.train()` make these two calls themselves
    ...         sf.update(step)
    >>> isinstance(step, sf.Step), run.state.step
    (True, 8)
    """

    def __post_init__(self) -> None:
        self.parts = build(self._copied_settings())
        # with the number that was chosen for {n}; a user cannot assign a setting
        vars(self)["run_dir"] = self.parts.settings.run_dir
        self.configuration: str | None = None  # text of config.toml, set by the command line
        self.session: Session | None = None  # while the run is open

    def _copied_settings(self) -> RunSettings:
        """Return the settings alone: the components must not refer to the run that has them."""
        names = [field.name for field in fields(RunSettings)]
        return RunSettings(**{name: getattr(self, name) for name in names})

    if not TYPE_CHECKING:  # a type checker should not take every name

        def __getattr__(self, name: str) -> NoReturn:
            is_public = not name.startswith("_")  # other names are asked for by Python and IPython
            known = [each for each in dir(self) if is_public and not each.startswith("_")]
            raise attribute_error("Run", name, known)

    def __repr__(self) -> str:
        return messages.in_one_line(self.parts) if "parts" in vars(self) else "Run(refused)"

    def _repr_html_(self) -> str | None:
        """Return the course of the run for a notebook's cell, or None before the first record."""
        from surefoot.run.after import html_of

        return html_of(self.parts) if "parts" in vars(self) else None

    @property
    def state(self) -> State:
        """The models, optimizers and EMA models by name, and the number of completed steps."""
        return self.parts.state

    @property
    def rank(self) -> int:
        """The rank of this process, from 0."""
        return self.parts.world.rank

    @property
    def world_size(self) -> int:
        """The number of ranks that train the run."""
        return self.parts.world.size

    # --- three ways to train ----------------------------------------------------------------------

    @at_boundary
    def train(self) -> None:
        """Train all remaining steps. Opens the run if it is not open."""
        if self.session is not None:
            self._train_open()
            return
        self.parts.run_state.user_state.is_complete = True
        with self:
            self._train_open()

    def _train_open(self) -> None:
        self._open("run.train()").periodic.alone = True
        for _ in self:
            pass

    def __iter__(self) -> Iterator[Step]:
        """Execute the steps one after another and yield each step. Its checkpoint is saved after
        the loop body.
        """
        if self.parts.task.loss is None:
            raise without_loss()
        self._open("for step in run")
        return chain.from_iterable(self._loops(opened=False))

    def steps(self) -> Iterator[Step]:
        """Yield each step before its update. The loop body calls `forward_backward` and
        `update`.
        """
        self._open("for step in run.steps()")
        return chain.from_iterable(self._loops(opened=True))

    def _loops(self, *, opened: bool) -> Iterator[Iterator[Step]]:
        """Yield the loop of the session, and of those that follow it where settings change."""
        while self.session is not None:
            session = self.session
            loop = session.steps(opened=opened)
            yield loop
            is_current = self.session is session and session.running is loop
            if not is_current or not self._goes_on():
                return
            self._begin_next_session(session)

    def _goes_on(self) -> bool:
        """Return True if the session has ended because settings change, and the run can be built
        again with the new ones. Collective.
        """
        session = self._open("for step in run")
        has_change = self.parts.is_at_change or session.stop_requests.has_change
        if not session.takes_changes or (self.parts.finished and not has_change):
            return False
        # only one rank may know that the time is over
        world = self.parts.world
        return bool(world.from_main(world.is_main and session.begin_change()))

    def _begin_next_session(self, before: Session) -> None:
        """Close a session, and open another one with the settings of the next step. The run's
        directory stays locked. Collective.
        """
        self.session = None
        directory = before.parts.directory
        assert directory is not None  # only there can settings change
        before.is_followed = True
        # the handlers of the sessions are away while the run is built
        signals = Signals(before.signals.standing, say=before.signals.say)
        signals.install()
        try:
            before.close(None)
            session = self._following_session(before)
        except BaseException:
            directory.close()
            raise
        finally:
            before.end_request()
            signals.restore()
        session.signals.stop = session.signals.stop or signals.stop
        session.signals.save |= signals.save
        session.stop_requests.deadline = before.stop_requests.deadline  # one for all sessions
        session.periodic.alone = before.periodic.alone
        self.session = session

    def _following_session(self, before: Session) -> Session:
        """Build the run again, and open the session that follows `before`. New lines of the journal
        are taken away if no session can follow with them. If only another process has asked for
        them, the run goes on without them. Collective.
        """
        self.parts.follows = True
        try:
            self._build_again(self.parts, step=None)
            return self._open_session()
        except (ConfigError, OtherModelError) as problem:  # on all ranks
            if not before.take_back_changes() or before.stop_requests.change:
                raise
            before.parts.say(f"note: a change of settings is taken back: {first_line(problem)}")
        self._build_again(self.parts, step=None)
        return self._open_session()

    def _open_session(self) -> Session:
        """Open a session. The components are built again if settings were changed since they were
        built, or if the checkpoint at a change is damaged. Collective.
        """
        while True:
            session = Session(self.parts, configuration=self.configuration)
            try:
                session.open()
                return session
            except OtherSettings as problem:
                if not session.takes_changes:
                    raise problem.refusal from None
                step = problem.step
            self._build_again(self.parts, step=step)

    def _build_again(self, before: RunComponents, *, step: int | None) -> None:
        """Build the components with the settings that the run has after `step` steps, or after its
        newest checkpoint. Collective.
        """
        from surefoot.run.retired import follow_optimizers, free, retire

        assert before.directory is not None  # only there can settings change
        free(before.state)
        with built_again(before.directory.path, step=step):
            parts = build(self._copied_settings(), directory=before.directory)
        self.parts = replace(
            parts,
            example=before.example,
            alert=before.alert,
            accept_change=before.accept_change,
            follows=before.follows,
        )
        user_state = before.run_state.user_state
        follow_optimizers(user_state.objects.values(), before.state, present=self.parts.state)
        for name, registered in user_state.objects.items():
            self.register_state(name, registered)
        self.parts.run_state.user_state.is_complete = user_state.is_complete
        retire(before.state, present=self.parts.state)

    def stop(self) -> None:
        """Stop the run after this step and save the step, like `break`. Use this method outside the
        loop body.

        If only some ranks call the method, all ranks stop after the next step.
        """
        self._open("run.stop()").stop_requests.run_stop = True

    @at_boundary
    def change(self, setting: str, value: Any, *, because: str = "") -> None:
        """Change a setting from the next step on, as `surefoot change` does: `run.change(
        "optimizer.lr", 1e-4, because="plateau")`. Collective: call it in the body of the loop.

        The change is a line of the run's journal. After this step the run is saved and built again,
        and the loop goes on with the new value; if the model was passed as an object, the loop
        ends, and a restart goes on. A call with the present value does nothing, so a step that is
        repeated after a crash may call it again. A schedule named for another reason begins anew.
        Raises `ConfigError` for a setting that cannot change or cannot have the value.
        """
        session = self._open("run.change()")
        directory = self.parts.directory
        if directory is None:
            raise without_directory()
        step = session.finished_steps
        has_changed = False
        with self._together(f"run.change({setting!r})"):
            if self.parts.world.is_main:
                has_changed = change_settings(
                    directory.path, setting, value, because=because, step=step
                )
            has_changed = bool(self.parts.world.from_main(has_changed))
        session.stop_requests.change |= has_changed

    @at_boundary
    def register_state(self, name: str, obj: Any) -> Any:
        """Save an object in every checkpoint, and restore it in a resumed run. Call this method
        before the first step.

        `obj` is a tensor, a `torch.Generator`, a torchmetrics metric, or an object with state_dict
        and load_state_dict. `obj` can also be a dictionary or list of JSON values and tensors
        (keys: strings or integers). Returns `obj`. Raises `CheckpointError` if the state after the
        restore differs from the saved state. All ranks must register the object; rank 0's state is
        saved.
        """
        registered = self.parts.run_state.user_state.objects
        if name in registered and registered[name] is not obj:
            raise ConfigError(
                "state-name-taken",
                problem=f"run.register_state({name!r}, ...): another object has this name",
                reason="a checkpoint would hold only one of them",
                remedy="choose another name",
                name=name,
            )
        self.parts.run_state.user_state.add(name, obj)
        self.parts.state.buffers.follow_object(name, obj)
        return obj

    @at_boundary
    def __enter__(self) -> Self:
        """Open the directory. Resume from its newest intact checkpoint, or save step 0."""
        refuse_training_at_import()
        if self.session is not None:
            raise ConfigError("run-opened-twice", problem="this run is already open")
        self.session = self._open_session()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        problem: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Save unsaved steps and close the run.

        `break` ends the run like `stop`: the step is complete, and a resume continues with the next
        step. After an exception the incomplete step is not saved, and `crash/` contains a report. A
        run stopped by a signal exits with status 130 or 143.
        """
        session = self.session
        self.session = None
        if session is not None:  # None: opening the session after a change has failed
            session.close(problem)
        if isinstance(problem, Exception):
            cut_frames(problem)

    def _open(self, call: str) -> Session:
        if self.session is None:
            raise ConfigError(
                "run-not-open",
                problem=f"`{call}` is outside `with run:`",
                reason="an exception in your code would then look like `break`, and an incomplete step"
                " would be saved",
                remedy="write `with run:` around the loop, or call run.train()",
                call=call,
            )
        return self.session

    # --- at any time ------------------------------------------------------------------------------

    @at_boundary
    def evaluate(self, *splits: str) -> dict[str, float]:
        """Evaluate splits, with the averaged weights if the run has them. Return {"SPLIT/METRIC":
        value}. Collective.

        Default: all splits except those with `at_end`. Changes and records nothing. Raises
        `ConfigError` for an unknown split.
        """
        scoring = self.parts.evaluator
        self._refuse_unknown(*splits)
        with self._together(f"run.evaluate({', '.join(map(repr, splits))})"):
            return numbers(scoring.scores(splits or scoring.names(at_end=False)))

    def _refuse_unknown(self, *names: str) -> None:
        splits = self.parts.evaluator.splits
        for name in names:
            if name not in splits:
                raise ConfigError(
                    "unknown-split",
                    problem=f"split {name!r} does not exist",
                    reason=f"splits of this run: {', '.join(splits) or 'none'}",
                    remedy=f"add it: Run(splits={{{name!r}: sf.Split(data)}})",
                    setting="splits",
                    value=name,
                )

    @at_boundary
    def predict(self, split: Any) -> Any:
        """Return the outputs of the evaluated model for every sample of a split or a data set, once
        and in its order, on the CPU. Collective: every rank returns all of them.

        `split` is the name of a split, a `Split`, or a data set. The outputs are those that metrics
        get; a data set alone needs no targets, and its outputs are `model(inputs)`. Tensors have
        one row for each sample, or are a list with one tensor for each sample if their other
        dimensions differ. Changes and records nothing.
        """
        if isinstance(split, str):
            self._refuse_unknown(split)
            name, chosen = split, self.parts.evaluator.splits[split]
        else:
            name = "predict"
            data = (split,) if isinstance(split, Tensor) else split
            chosen = split if isinstance(split, Split) else Split(data, loss=False)
            check_split(name, chosen.data, seed=self.parts.pipeline.seed)
        with self._together(f"run.predict({split!r})" if split is name else "run.predict()"):
            return self.parts.evaluator.predict(name, chosen)

    @at_boundary
    def sample(self) -> str | Sequence[str]:
        """Return the result of the run's `sample_fn` with the evaluated model. Changes nothing.
        Collective.
        """
        if self.parts.settings.sample_fn is None:
            raise _without_function("sample_fn")
        with self._together("run.sample()"):
            return draw_sample(self.parts.evaluator, self.parts.settings, self.parts.world)

    @at_boundary
    def make_panels(self) -> "Panels":
        """Return the panels that the run's `panels_fn` builds with the evaluated model. Warns of
        missing panels. Collective.
        """
        if self.parts.settings.panels_fn is None:
            raise _without_function("panels_fn")
        with self._together("run.make_panels()"):
            return make_panels(
                self.parts.evaluator,
                self.parts.settings,
                step=self.state.step,
                say=self.parts.say,
            )

    @contextmanager
    def _together(self, call: str) -> Iterator[None]:
        place = f"in {call} at step {self.state.step}"
        try:
            with self.parts.world.during(place, meet=True), self.parts.numerics():
                yield
                # rank 0 alone may have called code of the user that requests to stop or to save
                if self.session is not None:
                    self.session.stop_requests.agree()
        except RuntimeError as problem:
            from surefoot.distributed.liveness import of_connection

            if self.session is None and of_connection(problem):
                raise ConfigError(
                    "call-after-a-rank-has-ended",
                    problem=f"rank {self.rank} is {place}, but another rank has ended",
                    reason="every rank takes part in this call",
                    remedy="make the call on every rank, not below `if run.rank == 0:`",
                    rank=self.rank,
                ) from problem
            raise

    @at_boundary
    def save(self) -> None:
        """Write a checkpoint in the background after this step and its loop body.

        If only some ranks call the method, the checkpoint is written one step later.
        """
        if self.parts.checkpointing is None:
            raise without_directory()
        self._open("run.save()").stop_requests.run_save = True

    @at_boundary
    def load_checkpoint(self, checkpoint: Checkpoint) -> list[str]:
        """Restore the weights and all other state of a checkpoint. The checkpoint's settings may
        differ from the run's settings.

        For the mean of several checkpoints, the statistics of batch norms are computed anew from
        the training data. Returns one line for each difference between the data of the run and of
        the checkpoint.
        """
        self.parts.compute_as(checkpoint.saved.identity)
        state_dict.restore(self.parts.run_state, checkpoint, where=f"step {checkpoint.step}")
        if checkpoint.of_newest:
            from surefoot.train.renewed_statistics import renew_statistics

            problem = renew_statistics(self.parts, self.parts.evaluator.models())
            if problem is not None:
                warn_of_statistics(checkpoint, because=problem)
        now = json.loads(json.dumps(self.parts.plan.identity["data"]))
        return differences({"data": checkpoint.saved.identity["data"]}, {"data": now})


def without_directory() -> ConfigError:
    """Return the error of a run without a directory, where one is needed."""
    return ConfigError(
        "run-without-directory",
        problem="this run has no directory",
        reason="only a run with a directory is saved",
        remedy="pass Run(run_dir=...)",
        setting="run_dir",
    )


def without_loss() -> ConfigError:
    """Return the error of a run without a loss function, where its steps are executed for it."""
    return ConfigError(
        "run-without-loss",
        problem="this run has no loss function",
        remedy="pass Run(loss=...); for a model with its own loss, as in transformers:"
        " Run(loss=sf.losses.of_model)\nelse only your own loop can execute its steps:"
        " for step in run.steps(): ...",
        setting="loss",
    )


def _without_function(setting: str) -> ConfigError:
    return ConfigError(
        "run-without-function",
        problem=f"this run has no {setting}",
        remedy=f"pass Run({setting}=...)",
        setting=setting,
    )


Run.__doc__ = KeywordsDoc(Run.__doc__)  # type: ignore[assignment]


def check_run(run: object, *, call: str, verb: str) -> None:
    """Raise `ConfigError` if what was passed to a function of steps is no run, such as a path;
    `verb` is the subcommand that takes a path.
    """
    if not isinstance(run, Run):
        raise ConfigError(
            "call-needs-a-run",
            problem=f"{call} was passed a {type(run).__name__}",
            reason="it makes steps, and needs the sf.Run that has their model, data and loss",
            remedy=["pass the sf.Run", ("for a directory, type", Command(f"surefoot {verb} RUN"))],
            call=call,
            value=type(run).__name__,
        )


@contextmanager
def trial_steps(run: Run, *, call: str = "trial steps") -> Iterator[RunComponents]:
    """Yield a run's components for trial steps, which leave the run bit for bit as it was.
    Collective; `call` names the user's call.

    The run's clock does not count the trial. A run that is not open starts with its initial
    weights. The block must not use the run's meter, and must read data with another feed. Raises
    `ConfigError` if the run has no loss or is in the middle of a step.
    """
    parts = run.parts
    if parts.task.loss is None:
        raise without_loss()
    if any(parameter.grad is not None for parameter in parts.state.parameters):
        raise ConfigError(
            "run-in-the-middle-of-a-step",
            problem="the run is in the middle of a step: no update has used its gradients",
            remedy="call this before the loop, or between two steps of `for step in run`",
            step=parts.state.step,
        )
    clock = parts.run_state.clock
    spent_s = clock.now() - clock.since
    try:
        with run._together(call), parts.snapshot():
            if run.session is None:
                start_from_init(parts)
                parts.make_ready()
            yield parts
    finally:
        clock.since = clock.now() - spent_s  # at the end, because restoring takes time too
