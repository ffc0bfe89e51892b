"""Access to a run's directory. Each method imports its own tools, so that reading metrics needs no
torch.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Any

from surefoot.config.extras import needed_for
from surefoot.config.paths import run_path
from surefoot.config.tree import did_you_mean
from surefoot.errors import ConfigError, DataError, SurefootError, at_boundary, first_line
from surefoot.tracking.numbered import is_numbered

if TYPE_CHECKING:
    import pandas
    from torch import nn

    from surefoot.checkpoint.format import Checkpoint
    from surefoot.program import Program
    from surefoot.recipes.export.export import ExportResult, Layout, Weights
    from surefoot.run.run import Run
    from surefoot.tools.diagnose.finding import Finding
    from surefoot.tools.replay.replay import Replay
    from surefoot.tools.report.headline import State
    from surefoot.tools.report.series import ReportedRun
    from surefoot.tools.verify.verdict import Verdict
    from surefoot.tools.verify.verify import Steps, Watching
    from surefoot.tracking.panels_file import Panels
    from surefoot.tracking.record import Record

_BY_SCRIPT = (
    "only the script that built this run can rebuild it; add to it: print(sf.load(run).verify())"
)


def load(run: str | os.PathLike[str] | Run, *, run_changed_program: bool = False) -> SavedRun:
    """Return the saved run in a directory, without reading its files.

    `run` can also be a `Run` that is not open. Pass a `Run` if only your script can build the run
    again. It is used as it is: if its code has changed since the run was trained, `verify` finds
    other values. With a directory, methods that execute the run's program raise an error if the
    program has changed, unless `run_changed_program` is True.
    """
    if isinstance(run, str | bytes | os.PathLike):
        path = run_path(run, setting="run")
        if is_numbered(path) and not path.exists():
            raise ConfigError(
                "run-without-number",
                problem=f"run: {path} has {{n}} in place of a number, and is no directory",
                reason="a run with {n} in its run_dir has taken a number",
                remedy="give the directory that it has taken: run.run_dir",
                setting="run",
                value=str(path),
            )
        return SavedRun(path, run_changed_program=run_changed_program)
    from surefoot.run.run import Run, without_directory
    from surefoot.tools.replay.rerun import refuse_open_run

    if not isinstance(run, Run):
        raise ConfigError(
            "load-needs-a-run",
            problem=f"run is a {type(run).__name__}",
            reason="load needs the directory of a run, or the sf.Run that trained it",
            remedy='write sf.load("runs/a")',
            setting="run",
            value=type(run).__name__,
        )
    if run.parts.directory is None:
        raise without_directory()
    refuse_open_run(run.parts)
    return SavedRun(run.parts.directory.path, built=run)


@dataclass(frozen=True)
class SavedRun:
    """A run directory, finished or still training. Each property and method reads the files again.

    Only `replay`, `evaluate`, `verify` of steps, and `load_model` without a model execute the run's
    program. These methods use the `Run` passed to `load`, if any, and leave its state unchanged.

    >>> import tempfile, torch, surefoot
    >>> def build(run_dir):
    ...     def loss(model, batch):
    ...         return (model(batch[0]) - batch[1]).square().mean()
    ...
    ...     data = torch.linspace(-1, 1, 8)[:, None]
    ...     net, sgd = lambda: torch.nn.Linear(1, 1), surefoot.optim.sgd(lr=0.1)
    ...     settings = dict(
    ...         batch_size=4, length="4 steps", device="cpu", console=False, log_every="2 steps"
    ...     )
    ...     return surefoot.Run(
    ...         model=net,
    ...         loss=loss,
    ...         train_data=(data, 3 * data),
    ...         optimizer=sgd,
    ...         run_dir=run_dir,
    ...         **settings,
    ...     )
    >>> with tempfile.TemporaryDirectory() as out:
    ...     build(out).train()
    ...     run = load(out)
    ...     (
    ...         run.step,
    ...         run.status,
    ...         run.checkpoints,
    ...         [record["step"] for record in run.records("train")],
    ...     )
    ...     (
    ...         isinstance(run, SavedRun),
    ...         type(run.load_model(torch.nn.Linear(1, 1))).__name__,
    ...         run.panels(),
    ...     )
    ...     load(build(out)).verify().exit_status
    (4, 'finished', [0, 4], [2, 4])
    (True, 'Linear', None)
    0
    """

    path: Path
    run_changed_program: bool = field(default=False, kw_only=True)
    built: Run | None = field(default=None, kw_only=True, repr=False)
    read_program: Callable[[], tuple[Program, Any]] | None = field(
        default=None, kw_only=True, repr=False
    )

    # --- read the directory without executing the program -----------------------------------------

    @property
    def step(self) -> int:
        """The number of completed steps, from the records or the newest checkpoint."""
        return self._read().last_step

    @property
    def status(self) -> State:
        """The status: "running", "finished", "stopped", "diverged", "failed", or "dead" (ended
        without a final record).
        """
        from surefoot.tools.report.headline import state_of

        return state_of(self._read())

    @property
    def settings(self) -> dict[str, Any]:
        """The settings in config.toml, by dotted name such as "optimizer.lr"."""
        return dict(self._read().files.config.flat)

    @property
    def metrics(self) -> dict[str, float]:
        """The last value of each metric, including the final evaluation, as {"SPLIT/METRIC":
        value}.
        """
        from surefoot.tracking.record import scores_in

        last_scores: dict[str, float] = {}
        for record in self.records():
            if record["kind"] in ("eval", "final_eval"):
                last_scores.update(scores_in(record))
        return last_scores

    @property
    def checkpoints(self) -> list[int]:
        """The steps with a checkpoint, in ascending order."""
        from surefoot.checkpoint.store import Store

        return Store(self._directory() / "checkpoints").steps()

    @at_boundary
    def settings_at(self, step: int) -> dict[str, Any]:
        """The settings that can change while the run goes on, with the values that they have in the
        step after `step` finished ones, by dotted name. Raises `ConfigError` for a step that the run
        does not have.
        """
        from surefoot.train.recorded_settings import settings_at

        return settings_at(self._directory(), step)

    @at_boundary
    # dry_run: a type checker takes every keyword of `**{"optimizer.lr": 1e-4}` for it
    def change(self, because: str = "", *, dry_run: Any = False, **settings: Any) -> list[str]:
        """Change settings from the newest checkpoint on, as `surefoot change` does, and return the
        lines that it prints: `change("it spikes", **{"optimizer.lr": 1e-4})`. With `dry_run`,
        nothing is written. A process that trains the run makes the change at its next record, and
        the call waits for it. Raises `ConfigError` for a setting that cannot change or cannot have
        the value.
        """
        from surefoot.tools.change.change import plan_changes
        from surefoot.tools.change.while_training import answer, ask_for_changes
        from surefoot.tracking.run_reader import is_running, newest_state
        from surefoot.train.changed_settings import Wish

        run = self._directory()
        wishes = [Wish(name, value, because) for name, value in settings.items()]
        if dry_run:
            step = newest_state(run)[0] if is_running(run) else None
            return plan_changes(run, wishes, step=step).lines
        if is_running(run):
            return answer(run, ask_for_changes(run, wishes))
        plan = plan_changes(run, wishes)
        plan.write()
        return plan.lines

    @at_boundary
    def go_back(self, step: int, because: str = "", **settings: Any) -> list[str]:
        """Go back to the state after `step` steps, as `surefoot change RUN --from-step` does, and
        change settings from there on: `go_back(1000, "it spikes", **{"optimizer.lr": 1e-4})`.
        Returns lines about what it does. The run goes on when it is trained again; until then its
        records have the steps after `step`. Raises `ConfigError` for a run that trains, for a step that it does not have, and for a
        setting as `change` does, and `CheckpointError` if no checkpoint up to the step is intact.
        """
        from surefoot.tools.change.go_back import plan_going_back
        from surefoot.train.changed_settings import Wish

        wishes = [Wish(name, value, because) for name, value in settings.items()]
        plan = plan_going_back(self._directory(), step, wishes, because=because)
        plan.write()
        return plan.lines

    @at_boundary
    def records(self, kind: str | None = None) -> list[Record]:
        """Return the records of one kind such as "train", or all records. Records that a resume has
        replaced are omitted.

        `dataframe` returns them as a table. Raises `ConfigError` if the file cannot be read or the
        kind does not exist.
        """
        from surefoot.tracking.jsonl import read_records
        from surefoot.tracking.record import KINDS
        from surefoot.tracking.run_reader import unreadable_records

        if kind is not None and kind not in KINDS:
            raise ConfigError(
                "kind-of-records-unknown",
                problem=f"kind = {kind!r} does not exist",
                reason=f"kinds of records: {', '.join(KINDS)}",
                remedy=did_you_mean(kind, KINDS) or None,
                setting="kind",
                value=kind,
            )
        try:
            metrics = self._directory() / "metrics.jsonl"
            metrics.stat()  # a run without the file is an error here
            lines = list(read_records(metrics))
        except OSError as problem:
            raise unreadable_records(self.path / "metrics.jsonl", problem) from problem
        return [record for record in lines if kind in (None, record["kind"])]

    @at_boundary
    def dataframe(self, kind: str | None = None) -> pandas.DataFrame:
        """Return the records of one kind such as "train", or all records, as a pandas DataFrame
        with the step as its index.

        Each value of a record is a column, and its kind if `kind` is None. Needs pandas (extra
        `notebook`). Raises `ConfigError` as `records` does, and if pandas is not installed.

        >>> import tempfile
        >>> directory = Path(tempfile.mkdtemp())
        >>> lines = [f'{{"kind": "train", "step": {step}, "loss": {1 / step}}}' for step in (2, 4)]
        >>> _ = (directory / "metrics.jsonl").write_text(chr(10).join([*lines, ""]))
        >>> load(directory).dataframe("train")["loss"].to_dict()
        {2: 0.5, 4: 0.25}
        """
        with needed_for("a DataFrame of records", "pandas", instead='or read run.records("train")'):
            import pandas
        records = self.records(kind)
        columns = dict.fromkeys(["step", "kind"])  # in the order in which they first occur
        for record in records:
            columns.update(dict.fromkeys(record))
        if kind is not None:
            del columns["kind"]
        return pandas.DataFrame(records, columns=list(columns)).set_index("step")

    @at_boundary
    def panels(self) -> Panels | None:
        """Return the panels of the report, or None without panels. Raises `DataError` if surefoot
        did not write the file.
        """
        from surefoot.tracking.panels_file import read_panels

        return read_panels(self._directory())

    @at_boundary
    def diagnose(self) -> list[Finding]:
        """Return the problems in the records with evidence, likely causes and remedies. Errors come
        first.

        `surefoot diagnose RUN` prints the same findings. Needs no torch. Raises `ConfigError` if
        the directory contains no run.

        >>> import tempfile
        >>> place = Path(tempfile.mkdtemp())
        >>> lines = [
        ...     f'{{"kind": "train", "step": {step}, "loss": 2.3, "skipped": 0}}'
        ...     for step in range(1, 60)
        ... ]
        >>> _ = (place / "metrics.jsonl").write_text(chr(10).join(lines))
        >>> [finding.name for finding in load(place).diagnose()]
        ['loss-not-falling']
        """
        from surefoot.tools.diagnose.checks import findings
        from surefoot.tools.diagnose.reading import history_in

        return findings(history_in(self._directory()))

    @at_boundary
    def report(self, out: str | Path | None = None) -> Path:
        """Write the report page and return its path. `out` defaults to report.html in the run's
        directory. See `sf.report.write_page`.
        """
        from surefoot.tools.report.write import write_page

        return write_page(self._directory(), out=out)

    @at_boundary
    def export(
        self,
        out: str | Path | None = None,
        *,
        checkpoint: str | int = "newest",
        weights: Weights = "auto",
        layout: Layout = "auto",
        max_file: str = "5 GB",
        model: str = "model",
    ) -> ExportResult:
        """Write the weights of a checkpoint as safetensors for other libraries, with one tensor in
        memory at a time.

        `checkpoint` is "newest" (the newest intact checkpoint), "best", or a step. `weights="auto"`
        selects the averaged weights if the run has averaged weights. The layout "native" keeps the
        model's parameter names and copies the run's tokenizers. Tied tensors are stored once, and
        the file's metadata lists their other names. "transformers" writes a directory for
        transformers: the model of a finetune run, with merged adapters, or a `GPT` of the family
        llama or gpt2 as LlamaForCausalLM or GPT2LMHeadModel, with the tokenizer. "gpt2" is the
        latter with the tokenizer's file as it is. "peft" writes the adapter alone, of any run that
        trained a model of peft. "auto" is
        "transformers" for finetune runs, otherwise "native". Weights larger than `max_file` are
        split into several files with an index. `out` defaults to RUN/export. `model` selects one of
        several models. The checkpoint's bytes are verified before use. Raises `CheckpointError` if
        a file cannot be read or written, and `ConfigError` if an argument does not fit the run.
        """
        from surefoot.recipes.export.export import export

        return export(
            self._directory(),
            out,
            checkpoint=checkpoint,
            weights=weights,
            layout=layout,
            max_file=max_file,
            model=model,
            writes=self._exporting_recipe(),
        )

    def _exporting_recipe(self) -> Callable[..., list[str]] | None:
        from surefoot.config import toml
        from surefoot.config.paths import file_text

        path = self.path / "config.toml"
        described = toml.program(file_text(path), where=str(path)) if path.is_file() else {}
        if described.get("kind") != "recipe":  # the user's file is not executed
            return None
        from surefoot.program import program_and_config

        program, config = program_and_config(self.path)
        function = program.names.get("export")
        return None if function is None else partial(function, config)

    # --- need a model or the program --------------------------------------------------------------

    @at_boundary
    def load_model(
        self,
        model: nn.Module | Callable[[], nn.Module] | None = None,
        *,
        checkpoint: str | int = "newest",
        weights: Weights = "auto",
        device: str = "auto",
        name: str = "model",
    ) -> nn.Module:
        """Load the weights of a checkpoint into a model. Return the model on its device in
        evaluation mode.

        `model` is a module, or a class or function that returns a module. If `model` is None, the
        run's program builds the model. `checkpoint` is "newest" (the newest intact checkpoint),
        "best", a step, or "average N" for the mean of the last N checkpoints. `weights` is
        "averaged", "trained", or "auto" for the averaged weights if the run has averaged weights.
        Batch norms of a mean get new statistics from the training data if the run's program, or the
        `Run` passed to `load`, can read them. `name` selects one of several models. Raises `CheckpointError` if the weights do not fit the
        model.
        """
        from torch.nn import Module

        from surefoot.program import choose_checkpoint, step_of_settings
        from surefoot.run.model_kinds import needs_arguments
        from surefoot.train.model_weights import load_weights

        contents = choose_checkpoint(self._directory(), str(checkpoint))
        # the mean of several checkpoints needs the run's data for its batch norms
        run = self.built if contents.of_newest else None
        if model is None:
            run = self.rebuild(one_process=True, step=step_of_settings(contents))
            models = run.state.models
            if name not in models:
                raise ConfigError(
                    "model-name-unknown",
                    problem=f"name = {name!r}: no model has this name",
                    reason=f"models of this run: {', '.join(models)}",
                    setting="name",
                    value=name,
                )
            is_kept = self.built is None and not contents.of_newest
            model = models[name] if is_kept else deepcopy(models[name])
        elif not isinstance(model, Module):
            with suppress(ValueError):  # a class that is written in C may have no signature
                try:
                    signature(model).bind()
                except TypeError as problem:
                    raise needs_arguments(model, problem) from problem
            model = model()
        follows = bool(contents.of_newest) and run is not None
        loaded = load_weights(
            model,
            contents,
            name=name,
            device=device,
            weights=weights,
            statistics_follow=follows,
        )
        if follows and run is not None:
            self._copy_statistics(run, loaded, contents, name=name, weights=weights)
        return loaded

    def _copy_statistics(
        self, run: Run, model: nn.Module, mean: Checkpoint, *, name: str, weights: Weights
    ) -> None:
        from surefoot.train.model_weights import norms_with_statistics
        from surefoot.train.renewed_statistics import copy_statistics, renew_statistics

        if not norms_with_statistics({name: model}):
            return
        state = run.state
        with nullcontext() if self.built is None else run.parts.snapshot():
            run.load_checkpoint(mean)
            if weights == "trained" and state.ema_models:  # those of the average were computed
                renew_statistics(run.parts, state.models)
            copy_statistics(state.models[name], model)

    @at_boundary
    def evaluate(self, *splits: str, checkpoint: str | int = "newest") -> dict[str, float]:
        """Execute the run's program and evaluate a checkpoint. Return {"SPLIT/METRIC": value}.
        Collective.

        The default is all splits except those with `at_end`. `checkpoint` has the same values as in
        `load_model`.
        """
        with self._run_at(checkpoint, computes="metrics") as run:
            return run.evaluate(*splits)

    @at_boundary
    def predict(self, split: Any, *, checkpoint: str | int = "newest") -> Any:
        """Execute the run's program and return the outputs of a checkpoint for every sample of a
        split or a data set, as `Run.predict` does. Collective.
        """
        with self._run_at(checkpoint, computes="outputs") as run:
            return run.predict(split)

    @contextmanager
    def _run_at(self, checkpoint: str | int, *, computes: str) -> Iterator[Run]:
        """Yield the run with the weights of a checkpoint."""
        from surefoot.program import choose_checkpoint, step_of_settings
        from surefoot.recipes.optimizer_settings import note

        contents = choose_checkpoint(self._directory(), str(checkpoint))
        run = self.rebuild(one_process=False, step=step_of_settings(contents))
        with nullcontext() if self.built is None else run.parts.snapshot():
            if run.load_checkpoint(contents):
                note(
                    "warning: the data set has changed since training: these"
                    f" {computes} are for the changed data set"
                )
            yield run

    @at_boundary
    def replay(
        self, step: int, *, samples: int = 8, say: Callable[[str], None] | None = None
    ) -> Replay:
        """Repeat one step from the nearest earlier checkpoint and return its trace. `print`
        displays the trace.

        `step` counts from 0. `samples` limits the number of displayed samples. `say` receives the
        number of steps to repeat, their expected time, and the differences from the run. Executes
        the run's program.

        On the same machine the loss, gradient norm, module outputs and gradients equal the original
        step's values bit for bit. A compiled run is traced without compilation, so results are
        equal up to rounding. Raises `ConfigError` if the step does not exist or your own loop
        executes the steps. Raises `CheckpointError` if no earlier checkpoint is intact.
        """
        from surefoot.checkpoint.store import without_checkpoint
        from surefoot.tools.replay.replay import replay_step
        from surefoot.tracking.run_reader import journal_of, newest_state

        if not self.checkpoints:
            raise without_checkpoint(self.path)
        journal_of(self.path, *newest_state(self.path))  # else the step may have other settings
        run = self.rebuild(one_process=True, step=step)
        with nullcontext() if self.built is None else run.parts.snapshot():
            return replay_step(run.parts, step, samples=samples, say=say, path=self.path)

    @at_boundary
    def verify(
        self,
        *,
        steps: Steps = "auto",
        windows: int | None = None,
        seed: int | None = None,
        tolerance: float | None = None,
        say: Callable[[str], None] | None = None,
        progress_fn: Watching | None = None,
    ) -> Verdict:
        """Check all files, repeat steps from their checkpoints, and compare the results bit for
        bit. Writes nothing.

        By default 5 `windows` of `steps` steps are repeated. Without `seed`, the first, the last
        and evenly spaced windows are repeated; `seed` selects random windows. `steps="all"` repeats
        every step. `steps="auto"` repeats every step if this takes at most two minutes, otherwise
        100 steps per window. Repeating executes the run's program. If a script built the run or
        `windows` is 0, only files and records are checked. On another machine values may differ by
        the relative `tolerance` (default 0.01). `say` receives the expected cost, and
        `progress_fn(done, total)` the progress.

        Returns a verdict with proved, unproved and wrong parts. `surefoot verify` exits with the
        verdict's `exit_status`. Raises `CheckpointError` without a checkpoint, and `ConfigError`
        for a run of several ranks.
        """
        from surefoot.tools.verify.compare import TOLERANCE
        from surefoot.tools.verify.files import check_files
        from surefoot.tools.verify.rerun import WINDOWS
        from surefoot.tools.verify.verify import verify, verify_files

        files = check_files(self._directory())
        if self.built is None:
            if windows == 0:
                return verify_files(files, why="0 windows were requested")
            if self._read().files.config.script:
                return verify_files(files, why=_BY_SCRIPT)
        from torch.distributed.fsdp import FSDPModule

        from surefoot.distributed.rendezvous import left_afterwards

        # torch before 2.13 does not support one process under FSDP
        shards_one_process = hasattr(FSDPModule, "reset_iter_state")
        with left_afterwards():
            try:
                run = self.rebuild(one_process=True, sharded=shards_one_process)
            except DataError as problem:
                return verify_files(
                    files, why="the data set of the run cannot be read", problem=problem
                )
            except Exception as problem:
                # user code may fail too: the error then includes the verdict on the files
                problem.add_note(str(verify_files(files, why="the run cannot be rebuilt")))
                raise
            if run.parts.directory is None:
                from surefoot.run.run import without_directory

                raise without_directory().inside(f"the program of {self.path}")
            return verify(
                run,
                files,
                rebuild=lambda step: self.rebuild(
                    one_process=True, sharded=shards_one_process, step=step
                ),
                steps=steps,
                windows=WINDOWS if windows is None else windows,
                seed=seed,
                tolerance=TOLERANCE if tolerance is None else tolerance,
                say=say,
                progress_fn=progress_fn,
            )

    def _directory(self) -> Path:
        from surefoot.tracking.run_reader import missing_run, refuse_other_format

        self._refuse_untrained()
        if not self.path.is_dir():
            raise missing_run(self.path, self.path.parent)
        refuse_other_format(self.path)
        return self.path

    def _refuse_untrained(self) -> None:
        """Raise `ConfigError` if the `Run` passed to `load` has written nothing yet."""
        if self.built is None:
            return
        if any((self.path / name).exists() for name in ("config.toml", "metrics.jsonl")):
            return
        raise ConfigError(
            "run-not-trained",
            problem=f"this run was not trained yet: nothing is in {self.path}",
            remedy="call run.train() first",
            run=str(self.path),
        )

    def __repr__(self) -> str:
        try:
            return f"SavedRun({self.path}: step {self.step:,}, {self.status})"
        except SurefootError as problem:
            return f"SavedRun({self.path}: {first_line(problem)})"

    def _repr_html_(self) -> str | None:
        """Return the course of the run for a notebook's cell, or None if it cannot be read: the
        cell then shows the `repr`.
        """
        from surefoot.tools.report.cell import run_html

        with suppress(SurefootError):
            return run_html(self._read())
        return None

    def _read(self) -> ReportedRun:
        from surefoot.tools.report.series import read_reported_run

        self._refuse_untrained()
        return read_reported_run(self.path)

    def rebuild(self, *, one_process: bool, sharded: bool = False, step: int | None = None) -> Run:
        """Build the run with its program and the settings that it had after `step` steps (None:
        after its newest checkpoint), or return the `Run` passed to `load`. `one_process` does not
        shard, unless `sharded`.
        """
        if self.built is not None:
            return _with_settings_of(self.built, step, run_dir=self.path)
        from surefoot.program import build_run, for_one_process, in_directory, program_and_config

        if self.read_program is not None:
            program, config = self.read_program()
        else:
            program, config = program_and_config(self.path, run_changed=self.run_changed_program)
        if one_process:
            config = for_one_process(config, self.path, sharded=sharded)
        else:
            config = in_directory(config, self.path)
        return build_run(program, config, of=self.path, step=step)


def _with_settings_of(run: Run, step: int | None, *, run_dir: Path) -> Run:
    """Return a run with the settings that it had after `step` steps: itself, or one that is built
    like it if functions build its models.
    """
    from dataclasses import fields

    from surefoot.run.model_kinds import are_built_by_functions
    from surefoot.run.run import Run
    from surefoot.tracking.numbered import built_again
    from surefoot.train.run_settings import RunSettings

    parts = run.parts
    if step is None or parts.plan.segment_at(step).begin == parts.settings_begin:
        return run
    if not are_built_by_functions(run.model):
        return run
    with built_again(run_dir, step=step):
        earlier = Run(**{field.name: getattr(run, field.name) for field in fields(RunSettings)})
    for name, registered in parts.run_state.user_state.objects.items():
        earlier.register_state(name, registered)
    return earlier
