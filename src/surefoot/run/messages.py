"""Messages of a run: header, end, newest checkpoint, and `repr`."""

import math
import shlex
import sys
import warnings
from collections import Counter
from collections.abc import Mapping
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import torch

from surefoot.config.averaging import MUCH_OF_THE_START, averaging_of
from surefoot.config.behavior import behavior_of, note_of_older
from surefoot.config.toml import without_none
from surefoot.data.buckets import Buckets
from surefoot.data.fingerprints import all_within
from surefoot.distributed.shards import class_name, rows_of
from surefoot.errors import Setting
from surefoot.run.components import RunComponents
from surefoot.run.evaluation import Evaluations
from surefoot.tracking.commands import by_command, resume_command, typed
from surefoot.tracking.format import duration, number, wrapped
from surefoot.tracking.numbered import free_directory
from surefoot.tracking.record import PHASES
from surefoot.tracking.run_directory import RunDirectory
from surefoot.train.loss_accumulator import SKIPPED_SAMPLES
from surefoot.train.plan import Reasons
from surefoot.train.run_settings import RunSettings

_MANY_IN_BUFFERS = 1_000_000
_NO_BREAK = "\N{NO-BREAK SPACE}"

_LABEL = 11  # columns, at the start of a line of the header


def header(parts: RunComponents, *, resumed: bool) -> str:
    """Return the header of a run in lines of the console's width."""
    wrap = partial(wrapped, width=parts.width)
    length, step, device = parts.length, parts.state.step, parts.device
    sizes, plan = parts.pipeline.sizes, parts.pipeline.plan
    cut = (
        f" in {sizes.pieces} micro-batches of {sizes.micro_batch_size:,}"
        if sizes.pieces > 1
        else ""
    )
    world, how = parts.world, parts.plan.parallel.kind
    if world.size > 1:
        cut += f", {sizes.on_each_rank(world.size)} on each of {world.size} ranks"
    padded = f", {plan.padded_fraction():.0%} of them padding" if isinstance(plan, Buckets) else ""
    start = (
        f"resuming at step {step}{', the only saved one' * (not step)}"
        if resumed
        else f"from step {step}"
    )
    if parts.state.lr_factor < 1:
        start += f" with {parts.state.lr_factor:.3g} of the schedule's learning rate"
    count = torch.get_num_threads()
    threads = f", {count} thread{'s' * (count != 1)}" if device.type == "cpu" else ""
    reasons = Reasons() if resumed else parts.plan.reasons
    about = {
        "model": _models(parts),
        "data": "".join(f"{line}; " for line in parts.settings.data_summary[:1])
        + (
            f"{plan.samples:,} samples per epoch{parts.pipeline.order_text}; {length.steps:,} steps are {length.epochs:.2f} epochs"
            if parts.pipeline.tape is None
            else parts.pipeline.tape.in_words()
        ),
        "data from": parts.pipeline.data.about,
        "data read": "; ".join(reading_notes(parts)),
        "plan": f"{'up to ' * parts.pipeline.data.lists_batches}{sizes.batch_size:,} {sizes.unit} per step{cut}{padded}; {start}",
        "update": f"{_optimizers(parts)}; clip {parts.settings.clip}",
        "loss*": loss_remark(parts.settings),
        "watches": "; ".join(each.in_words for each in parts.run_state.watches),
        "precision": f"{precision_in_words(parts, reasons)}{', compiled' * parts.compiled}",
        "adds": _added(parts),
        "device": f"{f'{world.size} ranks ({how}) on {device.type}' if world.size > 1 else device}{threads}",
    }
    lines = [
        wrap(f"{label:<{_LABEL}}{text}", indent=_LABEL) for label, text in about.items() if text
    ]
    run_dir = parts.directory.shown if parts.directory else "not set, so nothing is saved"
    lines += [
        *map(wrap, choice_lines(parts, reasons)),
        wrap(f"{'run_dir':<{_LABEL}}{run_dir}", indent=_LABEL),
    ]
    if parts.directory is not None and parts.directory.numbered is not None:
        lines.append(f"{'resume':<{_LABEL}}{_resuming(parts.directory)}")
    if parts.directory is not None:
        lines.append(wrap(f"{'writes':<{_LABEL}}{', '.join(_written(parts))}", indent=_LABEL))
    copied = sum(buffer.numel() for buffer in parts.state.buffers.tensors())
    notes = {
        f"note: a step takes {sizes.batch_size} samples, but the data set has {plan.samples}:"
        " each step repeats samples": sizes.unit == "samples" and sizes.batch_size > plan.samples,
        f"note: the models' buffers contain {copied:,} elements, and every step copies them like batch statistics:"
        " register constants such as masks with persistent=False": copied > _MANY_IN_BUFFERS,
    }
    slow_average = _slow_average(parts)
    if slow_average is not None:
        notes[f"note: {slow_average}"] = True
    older = note_of_older(behavior_of(parts.plan.identity))
    if older is not None:
        notes[f"note: {older}"] = True
    return "\n".join([*lines, *(wrap(note) for note, holds in notes.items() if holds)])


def loss_remark(settings: RunSettings) -> str | None:
    """Return why the training loss is another quantity than the losses of splits, or None."""
    if settings.loss_note is not None:
        return f"the train loss has {settings.loss_note}; losses of splits have not"
    others = [
        f"{name}/loss" for name, split in (settings.splits or {}).items() if callable(split.loss)
    ]
    if not others:
        return None
    return f"the train loss is another function than {' and '.join(others)}"


def reading_notes(parts: RunComponents) -> list[str]:
    """Return what the data sets say of how their files were read, each thing once."""
    datasets = [parts.pipeline.dataset, *(each.data for each in parts.evaluator.splits.values())]
    notes = dict[str, None]()
    for dataset in datasets:
        for part in all_within(dataset):
            if type(part).__module__.startswith("surefoot."):
                notes.update(dict.fromkeys(getattr(part, "reading_notes", ())))
    return [*notes]


def _slow_average(parts: RunComponents) -> str | None:
    averaging = averaging_of(parts.plan.identity)
    steps = parts.length.steps
    if averaging is None or averaging.share_of_start(steps) <= MUCH_OF_THE_START:
        return None
    share = averaging.share_of_start(steps)
    began = "the initial weights" if averaging.start == 0 else f"those of step {averaging.start:,}"
    shorter = Setting("ema", float(f"{averaging.decay_for(steps):.3g}"))
    return (
        f"after {steps:,} steps the averaged weights, which are evaluated, still contain {share:.0%}"
        f" of {began}; for a run this short: {shorter}, or None"
    )


def ending(
    parts: RunComponents,
    evaluations: Evaluations,
    *,
    skipped: int,
    stopped_by: str | None = None,
    findings: str = "",
) -> str:
    """Return the message at the end of a session: outcome, change of the score, time per phase, and
    next commands.

    `skipped` is the number of skipped steps. `stopped_by` names the signal and its rank. `findings`
    is one line of text.
    """
    length, step, evaluation_due = parts.length, parts.state.step, evaluations.due
    best = parts.run_state.best
    watched = next((each for each in parts.run_state.watches if not each.of_training), None)
    over = next((rule for rule in parts.run_state.stopping if rule.exhausted), None)
    stopped = f"stopped{'' if stopped_by is None else f' by {stopped_by}'} at step {step:,} of {length.steps:,}"
    first, scores = ({}, {}) if evaluation_due else (evaluations.first, evaluations.scores)
    scores = _without_counts(scores)
    if evaluation_due:
        how = f"{stopped}, before its evaluation"
    elif step >= length.steps:
        how = f"finished: {step:,} steps"
    elif over is not None:
        how = f"stopped early at step {step:,}: {over.why_over}"
    else:
        how = stopped
    sentences = [how]
    if scores:
        earlier_best = None
        if watched is not None and watched.value is not None and watched.step not in (None, step):
            earlier_best = (watched.step, watched.value)
        score = next(iter(scores)) if watched is None else watched.score
        sentences += _moved(score, first, scores, best=earlier_best)
    if evaluations.at_end is not None:
        at, scores_at_end = evaluations.at_end
        whose = f"step {at:,}, the best" if at != step else f"the last step, {at:,}"
        shown = _without_counts(scores_at_end)
        listed = ", ".join(f"{name} {number(value)}" for name, value in shown.items())
        if listed:
            sentences.append(f"{listed} (evaluated once, with the weights of {whose})")
    lowered = parts.state.lr_factor
    sentences += [f"the learning rate was lowered to {lowered:.3g} of the schedule's"] * (
        lowered < 1
    )
    were = "step was" if skipped == 1 else "steps were"
    sentences += [f"{skipped} {were} skipped because of a non-finite gradient"] * (skipped > 0)
    sentences = [
        sentence.replace(" ", _NO_BREAK) for sentence in [*sentences, *_where_the_time_went(parts)]
    ]
    # a line ends between two sentences, or within a sentence longer than a line
    wrap = partial(wrapped, width=parts.width)
    lines = [wrap(line.replace(_NO_BREAK, " ")) for line in wrap("; ".join(sentences)).split("\n")]
    lines += [findings] * bool(findings)
    if parts.directory is not None:
        best_is_older = best is not None and best.step not in (None, step)
        lines += _next_commands(
            parts,
            parts.directory,
            best=best_is_older,
            finished=parts.finished and not evaluation_due,
        )
    return "\n".join(lines)


def finished(parts: RunComponents) -> str:
    """Return the message of a completed run that is started again."""
    where = f" in {parts.directory.shown}" if parts.directory else ""
    all_made = parts.state.step >= parts.length.steps
    why = (
        f"all {parts.length.steps:,} steps are completed" if all_made else "early stopping ended it"
    )
    another = f"for another run choose another {Setting('run_dir')}"
    if parts.directory is not None:
        another += f", such as {free_directory(parts.directory.shown)}"
    return f"this run{where} is finished: {why}. Nothing to do; {another}"


def standing(parts: RunComponents) -> str:
    """Return the step of the newest checkpoint, and the command that resumes from it or, at step 0,
    starts the run again.
    """
    if parts.directory is None or parts.saved_step is None:
        return "nothing was saved"
    how = "; resume" if parts.saved_step else ", so no training is saved; start again"
    return f"the newest checkpoint is at step {parts.saved_step}{how} with: {_resuming(parts.directory)}"


def script_toml(described: Mapping[str, Any]) -> str:
    """Return config.toml of a run built by a user's script, with the script's command and the
    resolved settings.
    """
    import tomlkit

    head = "# written by surefoot; a script built this run, so `surefoot resume` can only print its command\n\n"
    program = {"kind": "script", "command": ["python", *sys.argv]}
    return head + tomlkit.dumps({"program": program, "run": without_none(described)})


def _where_the_time_went(parts: RunComponents) -> list[str]:
    spent = parts.run_state.clock.state()["total_s"]
    times_s = {name: float(spent.get(phase, "0")) for phase, name in PHASES.items()}
    parted = [f"{duration(took_s)} {name}" for name, took_s in times_s.items() if took_s >= 1]
    return [f"took {duration(sum(times_s.values()))}: {', '.join(parted)}"] if parted else []


def _without_counts(scores: Mapping[str, float]) -> dict[str, float]:
    """Return the scores without the numbers of samples that were left out."""
    return {
        name: score for name, score in scores.items() if not name.endswith(f"/{SKIPPED_SAMPLES}")
    }


def _moved(
    score: str,
    first: dict[str, float],
    scores: dict[str, float],
    *,
    best: tuple[int, float] | None = None,
) -> list[str]:
    """Describe the change of a score since the run's first evaluation. `best` is (step, value) of
    an earlier best score.

    >>> _moved("a/loss", {"step": 5, "a/loss": 2.0}, {"a/loss": 1.5})
    ['a/loss fell from 2 at step 5 to 1.5']
    >>> _moved("a/loss", {"step": 5, "a/loss": 2.0}, {"a/loss": 1.5}, best=(9, 1.4))
    ['a/loss fell from 2 at step 5 to 1.4 at step 9, the best, and ended at 1.5']
    >>> _moved("a/loss", {"step": 5, "a/loss": 2.0}, {"a/loss": 2.0}, best=(5, 2.0))
    ['a/loss 2 at step 5, the best and last value']
    >>> _moved("a/bleu", {"step": 5, "a/bleu": 0.0}, {"a/bleu": 7.6e-14})
    ['a/bleu 7.6e-14']
    """
    before, after = first.get(score, math.nan), scores.get(score, math.nan)
    if math.isnan(after) and best is None:
        return [f"{score} is NaN"]
    value, reached = after, number(after)
    if best is not None:
        ended = " and last value" if after == best[1] else f", and ended at {reached}"
        value, reached = best[1], f"{number(best[1])} at step {best[0]:,}, the best{ended}"
    if math.isnan(before) or math.isclose(
        before, value, rel_tol=1e-9, abs_tol=1e-9
    ):  # equal up to rounding
        return [f"{score} {reached}"]
    return [
        f"{score} {'fell' if value < before else 'rose'} from {number(before)} at step {first['step']:,.0f} to {reached}"
    ]


def _next_commands(
    parts: RunComponents, directory: RunDirectory, *, best: bool, finished: bool
) -> list[str]:
    path = shlex.quote(str(directory.shown))
    if not finished:
        return [f"saved; resume with:  {_resuming(directory)}"]
    lines = [f"see {shlex.quote(str(directory.shown / 'report.html'))}"] * parts.settings.report
    if by_command():
        command, which = typed(Path(sys.argv[0])), " --checkpoint best" if best else ""
        if parts.example is not None:
            lines.append(
                f"use it: {command} predict {path}{parts.example and f' {shlex.quote(parts.example)}'}{which}"
            )
        lines.append(f"evaluate it: {command} evaluate {path}{which}")
    return lines


def _resuming(directory: RunDirectory) -> str:
    return resume_command(directory.shown, numbered=directory.numbered)


def _optimizers(parts: RunComponents) -> str:
    texts = []
    for name, trained in parts.state.optimizers.items():
        sizes = Counter[float]()
        for group in trained.optimizer.param_groups:
            sizes[group.get("weight_decay", 0)] += sum(
                prod((rows_of(each) or each).shape) for each in group["params"]
            )
        decays = " and ".join(
            f"{decay:g} for {size:,} parameters"
            for decay, size in sorted(sizes.items(), reverse=True)
        )
        prefix = "" if len(parts.state.optimizers) == 1 else f"{name}: "
        texts.append(f"{prefix}{type(trained.optimizer).__name__}, weight decay {decays}")
    return "; ".join(texts)


def precision_in_words(parts: RunComponents, reasons: Reasons) -> str:
    """Describe the precision and memory format. Add the reason for the choice, or the choice that
    "auto" would make.
    """
    plan = parts.plan
    words = plan.precision
    if plan.channels_last:
        words += ", channels last"
    if reasons.precision is not None:
        words += f" (auto: {reasons.precision})"
    elif reasons.auto is not None and reasons.auto.precision == plan.precision:
        words += f', as "auto" would choose ({reasons.auto.why})'
    elif reasons.auto is not None:
        words += f'; "auto" would choose {reasons.auto.precision} ({reasons.auto.why})'
    return words


def choice_lines(parts: RunComponents, reasons: Reasons) -> list[str]:
    """Return the header's lines on compilation, on `surefoot profile`, and on slow bf16 or fp16."""
    plan, device = parts.plan, parts.device.type
    lines = []
    if reasons.compile is not None:
        lines.append(f"compile {'on' if plan.compiles else 'off'} (auto: {reasons.compile})")
    if reasons.unknown:
        lines.append(
            "note: `surefoot profile` measures possible speedups on this machine"
            " (for a script: FILE.py:build; with compilation too: --speedups all)"
        )
    if parts.run_state.precision.emulated:
        lines.append(
            f"note: this {device} has no bf16 instructions, so bf16 is slow;"
            f" {Setting('precision', 'fp32')} is faster, but needs a new run"
        )
    if plan.precision == "fp16" and device == "cpu":
        lines.append(
            "note: fp16 on a CPU is slow and meant for tests only;"
            f" use {Setting('precision', 'bf16')} or fp32 to train"
        )
    return lines


def _added(parts: RunComponents) -> str:
    settings, schedule = parts.settings, parts.settings.schedule
    added = {
        f"clip {settings.clip}": settings.clip != "off",
        parts.plan.precision: parts.plan.precision != "fp32",
        "channels last": parts.layout.channels_last,
        "compiling": parts.compiled,
        f"averaged weights (ema {settings.ema})": settings.ema is not None,
        f"schedule {getattr(schedule, 'shape', 'of several')}": schedule is not None,
        f"activation_checkpointing {settings.activation_checkpointing}": settings.activation_checkpointing
        != "off",
    }
    return f"to a plain loop: {', '.join(what for what, applies in added.items() if applies) or 'nothing'}"


def _written(parts: RunComponents) -> list[str]:
    files = {
        "log.txt": parts.settings.text_log,
        "tensorboard": parts.writes_tensorboard,
        "report.html": parts.settings.report,
    }
    return [
        "checkpoints",
        "metrics.jsonl",
        *(name for name, written in files.items() if written),
        *parts.trackers,
    ]


def in_one_line(parts: RunComponents) -> str:
    """Return the model, data size, step and directory of a run for `repr`."""
    where = "no run_dir" if parts.directory is None else str(parts.directory.shown)
    step = f"step {parts.state.step:,} of {parts.length.steps:,}"
    return f"Run({_models(parts)}; {parts.pipeline.plan.samples:,} samples; {step}; {where})"


def _models(parts: RunComponents) -> str:
    return ", ".join(
        f"{class_name(model)} with {_parameters(model)}" for model in parts.state.models.values()
    )


def _parameters(model: torch.nn.Module) -> str:
    """Return the numbers of trainable and frozen parameters as text.

    >>> model = torch.nn.Sequential(
    ...     torch.nn.Linear(4, 3), torch.nn.Linear(3, 2).requires_grad_(False)
    ... )
    >>> _parameters(model)
    '15 trainable parameters, 8 frozen'
    """
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    frozen = sum(parameter.numel() for parameter in model.parameters()) - trained
    return f"{trained:,} trainable parameters" + (f", {frozen:,} frozen" if frozen else "")


def warn(message: str) -> None:
    """Issue a `UserWarning` that names the first line of the stack outside surefoot."""
    level, frame, package = 1, sys._getframe(), str(Path(__file__).parents[1])
    while frame.f_back is not None and frame.f_code.co_filename.startswith(package):
        level, frame = level + 1, frame.f_back
    warnings.warn(message, stacklevel=level)
