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
from surefoot.config.setting import without_effect
from surefoot.config.toml import without_none
from surefoot.data.buckets import Buckets
from surefoot.data.fingerprints import all_within
from surefoot.distributed.shards import class_name, rows_of
from surefoot.errors import Setting
from surefoot.run.components import RunComponents
from surefoot.run.evaluation import Evaluations
from surefoot.tracking.commands import by_command, resume_command, typed
from surefoot.tracking.format import counted, duration, number, wrapped
from surefoot.tracking.numbered import free_directory
from surefoot.tracking.record import PHASES
from surefoot.tracking.run_directory import RunDirectory
from surefoot.tracking.run_reader import REPORT
from surefoot.train.loss_accumulator import SKIPPED_SAMPLES
from surefoot.train.plan import Reasons
from surefoot.train.run_settings import RunSettings

_MANY_IN_BUFFERS = 1_000_000
_NO_BREAK = "\N{NO-BREAK SPACE}"

_LABEL = 11  # columns, at the start of a line of the header


def header(parts: RunComponents, *, resumed: bool) -> str:
    """Return the header of a run in lines of the console's width."""
    wrap = partial(wrapped, width=parts.width)
    reasons = Reasons() if resumed else parts.plan.reasons
    precision = precision_in_words(parts, reasons)
    if parts.compiled:
        precision += ", compiled"
    about = {
        "model": _models(parts),
        "data": _data(parts),
        "data from": parts.pipeline.data.about,
        "data read": "; ".join(reading_notes(parts)),
        "plan": f"{_batches(parts)}; {_start(parts, resumed=resumed)}",
        "update": f"{_optimizers(parts)}; clip {parts.settings.clip}",
        "loss*": loss_remark(parts.settings),
        "watches": "; ".join(watch.in_words for watch in parts.run_state.watches),
        "precision": precision,
        "adds": _added(parts),
        "device": _devices(parts),
    }
    lines = []
    for label, text in about.items():
        if text:
            lines.append(wrap(f"{label:<{_LABEL}}{text}", indent=_LABEL))
    for line in choice_lines(parts, reasons):
        lines.append(wrap(line))
    directory = parts.directory
    run_dir = "not set, so nothing is saved" if directory is None else directory.shown
    lines.append(wrap(f"{'run_dir':<{_LABEL}}{run_dir}", indent=_LABEL))
    if directory is not None and directory.numbered is not None:
        lines.append(f"{'resume':<{_LABEL}}{_resuming(parts, directory)}")
    if directory is not None:
        lines.append(wrap(f"{'writes':<{_LABEL}}{', '.join(_written(parts))}", indent=_LABEL))
    for note in _notes(parts):
        lines.append(wrap(f"note: {note}"))
    return "\n".join(lines)


def _data(parts: RunComponents) -> str:
    """Return the size of the data, and of the run in epochs."""
    summary = "".join(f"{line}; " for line in parts.settings.data_summary[:1])
    pipeline = parts.pipeline
    if pipeline.tape is not None:
        return summary + pipeline.tape.in_words()
    length = parts.length
    return (
        f"{summary}{pipeline.plan.samples:,} samples per epoch{pipeline.order_text};"
        f" {length.steps:,} steps are {length.epochs:.2f} epochs"
    )


def _batches(parts: RunComponents) -> str:
    """Return the size of a step, its micro-batches and its padding."""
    pipeline = parts.pipeline
    sizes = pipeline.sizes
    ranks = parts.world.size
    text = f"{sizes.batch_size:,} {sizes.unit} per step"
    if pipeline.data.lists_batches:
        text = f"up to {text}"
    if sizes.pieces > 1:
        text += f" in {sizes.pieces} micro-batches of {sizes.micro_batch_size:,}"
    if ranks > 1:
        text += f", {sizes.on_each_rank(ranks)} on each of {ranks} ranks"
    if isinstance(pipeline.plan, Buckets):
        text += f", {pipeline.plan.padded_fraction():.0%} of them padding"
    return text


def _start(parts: RunComponents, *, resumed: bool) -> str:
    """Return the step from which a session trains, and a lowered learning rate."""
    step = parts.state.step
    if not resumed:
        text = f"from step {step}"
    elif step:
        text = f"resuming at step {step}"
    else:
        text = "resuming at step 0, the only saved one"
    if parts.state.lr_factor < 1:
        text += f" with {parts.state.lr_factor:.3g} of the schedule's learning rate"
    return text


def _devices(parts: RunComponents) -> str:
    device = parts.device
    ranks = parts.world.size
    text = str(device)
    if ranks > 1:
        text = f"{ranks} ranks ({parts.plan.parallel.kind}) on {device.type}"
    if device.type == "cpu":
        text += f", {counted(torch.get_num_threads(), 'thread')}"
    return text


def _notes(parts: RunComponents) -> list[str]:
    """Return what is unusual in a run that starts or resumes."""
    notes = []
    sizes = parts.pipeline.sizes
    samples = parts.pipeline.plan.samples
    if sizes.unit == "samples" and sizes.batch_size > samples:
        notes.append(
            f"a step takes {sizes.batch_size} samples, but the data set has {samples}: each step"
            " repeats samples"
        )
    copied = sum(buffer.numel() for buffer in parts.state.buffers.tensors())
    if copied > _MANY_IN_BUFFERS:
        notes.append(
            f"the models' buffers contain {copied:,} elements, and every step copies them like"
            " batch statistics: register constants such as masks with persistent=False"
        )
    slow_average = _slow_average(parts)
    if slow_average is not None:
        notes.append(slow_average)
    for needed, names in without_effect(parts.settings).items():
        do_nothing = "does nothing" if len(names) == 1 else "do nothing"
        notes.append(f"without {needed}, {' and '.join(names)} {do_nothing}")
    best = parts.run_state.best
    if best is not None and parts.directory is None:
        notes.append(
            f"without run_dir, the weights with the best {best.score} are lost: the last ones remain"
        )
    older = note_of_older(behavior_of(parts.plan.identity))
    if older is not None:
        notes.append(older)
    return notes


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
    datasets = [parts.pipeline.dataset]
    datasets += [split.data for split in parts.evaluator.splits.values()]
    notes: dict[str, None] = {}
    for dataset in datasets:
        for part in all_within(dataset):
            if type(part).__module__.startswith("surefoot."):
                notes |= dict.fromkeys(getattr(part, "reading_notes", ()))
    return [*notes]


def _slow_average(parts: RunComponents) -> str | None:
    averaging = averaging_of(parts.plan.identity)
    if averaging is None:
        return None
    steps = parts.length.steps
    share = averaging.share_of_start(steps)
    if share <= MUCH_OF_THE_START:
        return None
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
    stopped_by: str,
    end_interrupted: bool = False,
    findings: str = "",
) -> str:
    """Return the message at the end of a session: outcome, change of the score, time per phase, and
    next commands.

    `skipped` is the number of skipped steps. `stopped_by` names what ended a session before the
    run's end. With `end_interrupted`, the evaluation at the end of the run is left to a resume. `findings` is one
    line of text.
    """
    outcome = _outcome(parts, evaluations, stopped_by=stopped_by, end_interrupted=end_interrupted)
    sentences = [outcome]
    sentences += _scores_in_words(parts, evaluations)
    lowered = parts.state.lr_factor
    if lowered < 1:
        sentences.append(f"the learning rate was lowered to {lowered:.3g} of the schedule's")
    if skipped:
        were = "step was" if skipped == 1 else "steps were"
        sentences.append(f"{skipped} {were} skipped because of a non-finite gradient")
    sentences += _where_the_time_went(parts)

    # a line ends between two sentences, or within a sentence longer than a line
    wrap = partial(wrapped, width=parts.width)
    text = wrap("; ".join(sentence.replace(" ", _NO_BREAK) for sentence in sentences))
    lines = [wrap(line.replace(_NO_BREAK, " ")) for line in text.split("\n")]
    if findings:
        lines.append(findings)
    if parts.directory is not None:
        best = parts.run_state.best
        lines += _next_commands(
            parts,
            parts.directory,
            best=best is not None and best.step not in (None, parts.state.step),
            finished=parts.finished and not evaluations.due and not end_interrupted,
        )
    return "\n".join(lines)


def _outcome(
    parts: RunComponents,
    evaluations: Evaluations,
    *,
    stopped_by: str,
    end_interrupted: bool,
) -> str:
    """Return how a session ended."""
    step = parts.state.step
    last_step = parts.length.steps
    stopped = f"stopped by {stopped_by} at step {step:,} of {last_step:,}"
    if evaluations.due:
        return f"{stopped}, before its evaluation"
    if end_interrupted:
        return f"{stopped}, before its last evaluation"
    if not parts.finished:
        return stopped
    if step >= last_step:
        return f"finished: {step:,} steps"
    for rule in parts.run_state.stopping:
        if rule.exhausted:
            return f"stopped early at step {step:,}: {rule.why_over}"
    return stopped


def _scores_in_words(parts: RunComponents, evaluations: Evaluations) -> list[str]:
    """Return how the main score changed, and the scores of splits that are evaluated once."""
    sentences: list[str] = []
    step = parts.state.step
    scores = _without_counts(evaluations.scores)
    if scores and not evaluations.due:
        score = next(iter(scores))
        earlier_best = None
        watched = next((watch for watch in parts.run_state.watches if not watch.of_training), None)
        if watched is not None:
            score = watched.score
            if watched.step is not None and watched.value is not None and watched.step != step:
                earlier_best = (watched.step, watched.value)
        sentences += _moved(score, evaluations.first, scores, best=earlier_best)
    if evaluations.at_end is not None:
        at, scores_at_end = evaluations.at_end
        whose = f"the last step, {at:,}" if at == step else f"step {at:,}, the best"
        shown = _without_counts(scores_at_end)
        listed = ", ".join(f"{name} {number(value)}" for name, value in shown.items())
        if listed:
            sentences.append(f"{listed} (evaluated once, with the weights of {whose})")
    return sentences


def finished(parts: RunComponents) -> str:
    """Return the message of a completed run that is started again."""
    where = ""
    another = f"for another run choose another {Setting('run_dir')}"
    if parts.directory is not None:
        where = f" in {parts.directory.shown}"
        another += f", such as {free_directory(parts.directory.shown)}"
    why = "early stopping ended it"
    longer = "early_stopping.patience=NUMBER"
    if parts.state.step >= parts.length.steps:
        why = f"all {parts.length.steps:,} steps are completed"
        longer = "length='NUMBER steps'"
    if parts.directory is not None:
        path = shlex.quote(str(parts.directory.shown))
        another = f"to go on with it: surefoot change {path} {longer}; {another}"
    return f"this run{where} is finished: {why}. Nothing to do; {another}"


def standing(parts: RunComponents) -> str:
    """Return the step of the newest checkpoint, and the command that resumes from it or, at step 0,
    starts the run again.
    """
    if parts.directory is None or parts.saved_step is None:
        return "nothing was saved"
    how = "; resume" if parts.saved_step else ", so no training is saved; start again"
    return f"the newest checkpoint is at step {parts.saved_step}{how} with: {_resuming(parts, parts.directory)}"


def script_toml(described: Mapping[str, Any]) -> str:
    """Return config.toml of a run built by a user's script, with the script's command and the
    resolved settings.
    """
    import tomlkit

    head = (
        "# written by surefoot; a script built this run, so `surefoot resume` can only print its"
        " command\n\n"
    )
    program = {"kind": "script", "command": ["python", *sys.argv]}
    return head + tomlkit.dumps({"program": program, "run": without_none(described)})


def _where_the_time_went(parts: RunComponents) -> list[str]:
    spent = parts.run_state.clock.state()["total_s"]
    times_s = {name: float(spent.get(phase, "0")) for phase, name in PHASES.items()}
    phases = [f"{duration(took_s)} {name}" for name, took_s in times_s.items() if took_s >= 1]
    if not phases:
        return []
    return [f"took {duration(sum(times_s.values()))}: {', '.join(phases)}"]


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
    before = first.get(score, math.nan)
    after = scores.get(score, math.nan)
    if math.isnan(after) and best is None:
        return [f"{score} is NaN"]
    value = after
    reached = number(after)
    if best is not None:
        best_step, value = best
        ended = " and last value" if after == value else f", and ended at {reached}"
        reached = f"{number(value)} at step {best_step:,}, the best{ended}"
    is_equal = math.isclose(before, value, rel_tol=1e-9, abs_tol=1e-9)  # up to rounding
    if math.isnan(before) or is_equal:
        return [f"{score} {reached}"]
    moved = "fell" if value < before else "rose"
    return [f"{score} {moved} from {number(before)} at step {first['step']:,.0f} to {reached}"]


def _next_commands(
    parts: RunComponents, directory: RunDirectory, *, best: bool, finished: bool
) -> list[str]:
    path = shlex.quote(str(directory.shown))
    if not finished:
        return [f"saved; resume with:  {_resuming(parts, directory)}"]
    lines = []
    if parts.settings.report:
        lines.append(f"see {shlex.quote(str(directory.shown / REPORT))}")
    if by_command():
        command = typed(Path(sys.argv[0]))
        which = " --checkpoint best" if best else ""
        if parts.example is not None:
            example = f" {shlex.quote(parts.example)}" if parts.example else ""
            lines.append(f"use it: {command} predict {path}{example}{which}")
        lines.append(f"evaluate it: {command} evaluate {path}{which}")
    return lines


def _resuming(parts: RunComponents, directory: RunDirectory) -> str:
    stops = parts.settings.stop_after is not None
    return resume_command(directory.shown, numbered=directory.numbered, stops=stops)


def _optimizers(parts: RunComponents) -> str:
    """Return the class of each optimizer, and the number of parameters by weight decay."""
    texts = []
    for name, trained in parts.state.optimizers.items():
        sizes = Counter[float]()
        for group in trained.optimizer.param_groups:
            decay = group.get("weight_decay", 0)
            sizes[decay] += 0  # a group without parameters is said too
            for parameter in group["params"]:
                sizes[decay] += prod((rows_of(parameter) or parameter).shape)
        by_decay = sorted(sizes.items(), reverse=True)
        decays = " and ".join(f"{decay:g} for {size:,} parameters" for decay, size in by_decay)
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
    """Return what a run does that a plain loop does not."""
    settings = parts.settings
    schedule = settings.schedule
    added = []
    if settings.clip != "off":
        added.append(f"clip {settings.clip}")
    if parts.plan.precision != "fp32":
        added.append(parts.plan.precision)
    if parts.layout.channels_last:
        added.append("channels last")
    if parts.compiled:
        added.append("compiling")
    if settings.ema is not None:
        added.append(f"averaged weights (ema {settings.ema})")
    if schedule is not None:
        added.append(f"schedule {getattr(schedule, 'shape', 'of several')}")
    if settings.activation_checkpointing != "off":
        added.append(f"activation_checkpointing {settings.activation_checkpointing}")
    return f"to a plain loop: {', '.join(added) or 'nothing'}"


def _written(parts: RunComponents) -> list[str]:
    files = ["checkpoints", "metrics.jsonl"]
    if parts.settings.text_log:
        files.append("log.txt")
    if parts.writes_tensorboard:
        files.append("tensorboard")
    if parts.settings.report:
        files.append(REPORT)
    return [*files, *parts.trackers]


def in_one_line(parts: RunComponents) -> str:
    """Return the model, data size, step and directory of a run for `repr`."""
    where = "no run_dir" if parts.directory is None else parts.directory.shown
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
    trained = 0
    frozen = 0
    for parameter in model.parameters():
        if parameter.requires_grad:
            trained += parameter.numel()
        else:
            frozen += parameter.numel()
    text = f"{trained:,} trainable parameters"
    return f"{text}, {frozen:,} frozen" if frozen else text


def warn(message: str) -> None:
    """Issue a `UserWarning` that names the first line of the stack outside surefoot."""
    package = str(Path(__file__).parents[1])
    frame = sys._getframe()
    level = 1
    while frame.f_back is not None and frame.f_code.co_filename.startswith(package):
        frame = frame.f_back
        level += 1
    warnings.warn(message, stacklevel=level)
