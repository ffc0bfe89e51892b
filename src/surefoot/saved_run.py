"""A run's directory, read and used after the training: `load`, and the `SavedRun` that it returns.

Each tool is imported by the method that calls it, so that a curve is read without torch.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import nullcontext
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from surefoot.config.paths import local_path
from surefoot.errors import CheckpointError, ConfigError, DataError

if TYPE_CHECKING:
    from torch import nn

    from surefoot.diagnose.finding import Finding
    from surefoot.export.export import ExportResult, Layout, Weights
    from surefoot.recipes.program import Program
    from surefoot.replay.replay import Replay
    from surefoot.report.headline import State
    from surefoot.report.series import ReportedRun
    from surefoot.run.run import Run
    from surefoot.tracking.panels_file import Panels
    from surefoot.tracking.record import Record
    from surefoot.verify.verdict import Verdict
    from surefoot.verify.verify import Steps, Watching

_BY_SCRIPT = "a script made this run, and only that can build it again; there: print(surefoot.load(run).verify())"


def load(run: str | os.PathLike[str] | Run, *, run_changed_program: bool = False) -> SavedRun:
    """Name a saved run by its directory; nothing is read until one of its methods is called.

    `run` may also be a `Run` that is built and not open, where only your script can build the program again. Some methods
    execute the program that made the run, and refuse one that changed since, unless `run_changed_program`.

    >>> load("runs/a").path.name
    'a'
    """
    if isinstance(run, str | bytes | os.PathLike):
        return SavedRun(local_path(run, setting="run"), run_changed_program=run_changed_program)
    from surefoot.run.run import Run

    if not isinstance(run, Run):
        raise ConfigError(
            f"run is a {type(run).__name__}\n  give the directory of a run, or a surefoot.Run that is built"
        )
    if run.parts.directory is None:
        raise ConfigError(
            "this run has no directory, so nothing of it is saved\n  give it one and train it first: Run(out=...)"
        )
    if run.sitting is not None:
        raise ConfigError("this run is open\n  load it after `with run:`, or before")
    return SavedRun(run.parts.directory.path, built=run)


@dataclass(frozen=True)
class SavedRun:
    """A run in its directory: finished, dead, or training now. Every access reads the files as they are then.

    `replay`, `evaluate`, `verify` of steps, and `load_model` without a model execute the run's program; nothing else does.
    A `Run` that was handed to `load` is used in its place, and is afterwards what it was.

    >>> import tempfile, torch, surefoot
    >>> def build(out):
    ...     def loss(model, batch):
    ...         return (model(batch[0]) - batch[1]).square().mean()
    ...     data = torch.linspace(-1, 1, 8)[:, None]
    ...     net, sgd = lambda: torch.nn.Linear(1, 1), surefoot.optim.sgd(lr=0.1)
    ...     settings = dict(batch_size=4, length="4 steps", device="cpu", console=False, log_every="2 steps")
    ...     return surefoot.Run(model=net, loss=loss, train_data=(data, 3 * data), optimizer=sgd, out=out, **settings)
    >>> with tempfile.TemporaryDirectory() as out:
    ...     build(out).train()
    ...     run = load(out)
    ...     run.step, run.status, run.checkpoints, [record["step"] for record in run.records("train")]
    ...     type(run.load_model(torch.nn.Linear(1, 1))).__name__, run.panels()
    ...     load(build(out)).verify().exit_status
    (4, 'finished', [0, 4], [2, 4])
    ('Linear', None)
    0
    """

    path: Path
    run_changed_program: bool = field(default=False, kw_only=True)
    built: Run | None = field(default=None, kw_only=True, repr=False)
    read_program: Callable[[], tuple[Program, Any]] | None = field(default=None, kw_only=True, repr=False)

    # --- what the directory says: no program is executed ---------------------------------------------------------

    @property
    def step(self) -> int:
        """How many steps were made, by the records."""
        return self._read().recorded.last_step

    @property
    def status(self) -> State:
        """What became of it: "running", "finished", "stopped", "diverged", "failed", or "silent" where no file says."""
        from surefoot.report.headline import state_of

        return state_of(self._read())

    @property
    def settings(self) -> dict[str, Any]:
        """The settings in config.toml by dotted name, such as "optimizer.lr"."""
        return dict(self._read().files.config.flat)

    @property
    def metrics(self) -> dict[str, float]:
        """The last value of each metric as {"SPLIT/METRIC": value}, those of the end included."""
        from surefoot.tracking.record import scores_in

        evaluated = [scores_in(record) for record in self.records() if record["kind"] in ("scores", "end")]
        return {name: value for scores in evaluated for name, value in scores.items()}

    @property
    def checkpoints(self) -> list[int]:
        """The steps of the checkpoints that are there, in order."""
        from surefoot.checkpoint.store import Store

        return Store(self.path / "checkpoints").steps()

    def records(self, kind: str | None = None) -> list[Record]:
        """The records of one kind ("train", "scores", ...), or all; none that a later resume superseded.

        `pandas.DataFrame(run.records("train"))` is a table of them. `ConfigError` where the file cannot be read.
        """
        from surefoot.tracking.jsonl import streamed

        try:
            lines = list(streamed(self.path / "metrics.jsonl"))
        except OSError as problem:
            raise ConfigError(f"cannot read {self.path / 'metrics.jsonl'}: {problem.strerror or problem}") from problem
        return [record for record in lines if kind in (None, record["kind"])]

    def panels(self) -> Panels | None:
        """What the report shows of the task; None where the run has none. `DataError` for a file that surefoot has not written."""
        from surefoot.tracking.panels_file import read_panels

        return read_panels(self.path)

    def diagnose(self) -> list[Finding]:
        """What the records show to be wrong, with evidence, likely causes and what to try; errors first. Torch-free.

        `ConfigError` where there is no run. `surefoot diagnose RUN` prints the same; docs/diagnose.md lists the findings.

        >>> import tempfile
        >>> place = Path(tempfile.mkdtemp())
        >>> lines = [f'{{"kind": "train", "step": {step}, "loss": 2.3, "skipped": 0}}' for step in range(1, 60)]
        >>> _ = (place / "metrics.jsonl").write_text(chr(10).join(lines))
        >>> [finding.name for finding in load(place).diagnose()]
        ['loss-not-falling']
        """
        from surefoot.diagnose.checks import findings
        from surefoot.diagnose.reading import history_in

        return findings(history_in(self.path))

    def report(self, out: str | Path | None = None) -> Path:
        """Write the page on this run to `out` (None: report.html in its directory); returns its path. See `sf.report.write_page`."""
        from surefoot.report.write import write_page

        return write_page(self.path, out=out)

    def export(
        self,
        out: str | Path | None = None,
        *,
        checkpoint: str | int = "newest",
        weights: Weights = "auto",
        layout: Layout = "own",
        max_file: str = "5 GB",
        model: str = "model",
    ) -> ExportResult:
        """Write a checkpoint's weights as others load them; never is more than one tensor in memory.

        `checkpoint` is "newest" (the newest intact one), "best", or a step. "auto" weights are the averaged ones where the run
        has them. In the layout "own" tensors have the model's names, tied ones once with the other names in the file's metadata;
        in "gpt2" they are named and turned as transformers' GPT2LMHeadModel has them, with its config.json, for a `GPT` of the
        family gpt2. Weights larger than `max_file` are several files and an index; the default `out` is RUN/export. `model` is
        one of several. Tokenizers of the run are copied along. Every byte that is used is checked first; raises
        `CheckpointError` for what cannot be read or written, `ConfigError` for what cannot be asked for.
        """
        from surefoot.export.export import export

        return export(
            self.path, out, checkpoint=checkpoint, weights=weights, layout=layout, max_file=max_file, model=model
        )

    # --- what needs a model, or the program ----------------------------------------------------------------------

    def load_model(
        self,
        model: nn.Module | Callable[[], nn.Module] | None = None,
        *,
        checkpoint: str | int = "newest",
        weights: Weights = "auto",
        device: str = "auto",
        name: str = "model",
    ) -> nn.Module:
        """Give a model the weights of a checkpoint, on a device and in evaluation mode; returns it.

        `model` is a module, or a class or function that makes one. Without it the run's program is executed to build it.
        `checkpoint` is "newest" (the newest intact one), "best", a step, or "average 5" of the last five. "auto" weights are the
        averaged ones where the run has them, else "averaged" or "trained". `name` is that of the model in a run of several.
        Raises `CheckpointError` where the weights do not fit.
        """
        from torch.nn import Module

        from surefoot.recipes.program import choose_checkpoint
        from surefoot.train.model_weights import load_weights

        contents = choose_checkpoint(self.path, str(checkpoint))
        if model is None:
            models = self.rebuild(one_process=True).state.models
            if name not in models:
                raise ConfigError(f"name = {name!r}: this run has {', '.join(models)}")
            model = models[name] if self.built is None else deepcopy(models[name])
        elif not isinstance(model, Module):
            model = model()
        return load_weights(model, contents, name=name, device=device, weights=weights)

    def evaluate(self, *splits: str, checkpoint: str | int = "newest") -> dict[str, float]:
        """Evaluate a checkpoint on the run's own splits, or on some; executes its program. Returns {"SPLIT/METRIC": value}. Collective.

        Without names on all but those that are for the end of the run. `checkpoint` as in `load_model`.
        """
        from surefoot.recipes.optimizer_settings import note
        from surefoot.recipes.program import choose_checkpoint
        from surefoot.verify.verify import as_before

        contents = choose_checkpoint(self.path, str(checkpoint))
        run = self.rebuild(one_process=False)
        if unknown := [name for name in splits if name not in run.parts.scoring.splits]:
            raise ConfigError(
                f"{self.path} has no split {unknown[0]!r}; it has: {', '.join(run.parts.scoring.splits) or 'none'}"
            )
        with nullcontext() if self.built is None else as_before(run.parts):
            if run.load_checkpoint(contents):
                note("warning: the data are others than the run was trained on: these scores are of those")
            return run.scores(*splits)

    def replay(self, step: int, *, samples: int = 8, say: Callable[[str], None] | None = None) -> Replay:
        """Make a step again, from the nearest checkpoint before it, and look at it closely; `print` what is returned.

        Executes the run's program. step: its number, from 0. samples: how many are shown. `say` is told beforehand how many steps
        have to be made again and how long that may take, and what is not as it was.

        Loss, norm, outputs of modules and gradients are those of the step, bit for bit on the same machine; compiled runs are
        looked at uncompiled, equal to rounding. Raises `ConfigError` for a step that the run has not, and for a run whose steps
        are made by code of your own; `CheckpointError` where no checkpoint before it is intact.
        """
        from surefoot.replay.replay import replayed
        from surefoot.verify.verify import as_before

        if not self.checkpoints:
            raise CheckpointError(f"{self.path} holds no checkpoint, so none of its steps can be made again")
        run = self.rebuild(one_process=True)
        with nullcontext() if self.built is None else as_before(run.parts):
            return replayed(run.parts, step, samples=samples, say=say, path=self.path)

    def verify(
        self,
        *,
        steps: Steps = "auto",
        windows: int | None = None,
        seed: int | None = None,
        tolerance: float | None = None,
        say: Callable[[str], None] | None = None,
        watch: Watching | None = None,
    ) -> Verdict:
        """Check all files, make steps again from their checkpoints, and compare every bit; nothing is written.

        Made again are `windows` (None: 5) times `steps` steps, the first, the last and evenly spread ones, or such as `seed` draws;
        "all" of them; "auto" all where the records let expect two minutes at most, else 100 each. That executes the run's
        program; with 0 windows, and for a run that a script made, files and records alone are checked. On another machine
        numbers may differ by `tolerance` (None: 0.01), relative to what was saved. `say` is told beforehand what it costs,
        `watch(made, of)` how far it is.

        Returns what is proved, what is not and what is wrong; its `exit_status` is that of `surefoot verify`. Raises
        `CheckpointError` where there is no checkpoint, `ConfigError` for a run of several ranks.
        """
        from surefoot.verify.compare import TOLERANCE
        from surefoot.verify.files import checked
        from surefoot.verify.rerun import WINDOWS
        from surefoot.verify.verify import verify, verify_files

        files = checked(self.path)
        if self.built is None and (windows == 0 or self._read().files.config.script):
            return verify_files(files, why="0 windows are asked for" if windows == 0 else _BY_SCRIPT)
        try:
            run = self.rebuild(one_process=True)
        except DataError as problem:
            return verify_files(files, why="the data cannot be read as they were", problem=problem)
        except Exception as problem:  # of the user's own code too: what is known of the files is told all the same
            problem.add_note(str(verify_files(files, why="it cannot be built again")))
            raise
        if run.parts.directory is None:
            raise ConfigError(f"what made {self.path} builds a run without a directory now: was `out` changed?")
        return verify(
            run,
            files,
            steps=steps,
            windows=WINDOWS if windows is None else windows,
            seed=seed,
            tolerance=TOLERANCE if tolerance is None else tolerance,
            say=say,
            watch=watch,
        )

    def _read(self) -> ReportedRun:
        from surefoot.report.series import read_reported_run

        return read_reported_run(self.path)

    def rebuild(self, *, one_process: bool) -> Run:
        """Build the run by its program, or return the one that was handed over; `one_process` has its weights whole."""
        if self.built is not None:
            return self.built
        from surefoot.recipes.program import build_run, for_one_process, in_directory, program_and_config

        if self.read_program is not None:
            program, config = self.read_program()
        else:
            program, config = program_and_config(self.path, run_changed=self.run_changed_program)
        config = (for_one_process if one_process else in_directory)(config, self.path)
        return build_run(program, config, of=self.path)
