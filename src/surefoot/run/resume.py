"""The opening of a run's directory: resume from the newest intact checkpoint, or save step 0."""

import json
import shlex
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from surefoot.checkpoint import module_state as contents
from surefoot.checkpoint.format import Checkpoint
from surefoot.checkpoint.module_state import OtherModelError
from surefoot.checkpoint.reader import interprets
from surefoot.config.accepted_changes import ANOTHER_RUN, FROM_ITS_WEIGHTS
from surefoot.config.data_change import AT_ONCE, ORDERS, data_changes
from surefoot.config.paths import look_at
from surefoot.config.setting_change import DATA, SettingChange
from surefoot.config.toml import with_choices
from surefoot.distributed.shards import local_part, plain_tensors
from surefoot.errors import CheckpointError, Command, ConfigError, Remedy, Setting, first_line
from surefoot.run import messages
from surefoot.run.checkpointing import Checkpointing
from surefoot.run.components import RunComponents
from surefoot.run.evaluation import BegunEnd
from surefoot.run.history import OtherSettings
from surefoot.run.model_kinds import are_built_by_functions
from surefoot.run.new_data import refuse_data_of_earlier_steps
from surefoot.tracking.branches import leave_branches
from surefoot.tracking.change_journal import CHANGES, append_changes, read_changes
from surefoot.tracking.commands import replay_command
from surefoot.tracking.jsonl import read_records
from surefoot.tracking.numbered import free_directory
from surefoot.tracking.run_directory import TEXT_LOG, RunDirectory, environment
from surefoot.tracking.run_reader import (
    divergence_from,
    read_sessions,
    refuse_other_format,
    run_file_not_written,
)
from surefoot.train import state_dict
from surefoot.train.buffer_check import BufferCheck
from surefoot.train.changed_settings import assignments, described, origins_of
from surefoot.train.model_weights import file_name, model_state, refuse_lossy
from surefoot.train.run_identity import differences, with_changed

if TYPE_CHECKING:
    from surefoot.checkpoint.state_json import Fingerprints
    from surefoot.train import state_check
    from surefoot.train.loss_contract import LossContract

# of the fingerprints: what is known only where the models have the weights of step 0
_OF_LOSS = ("loss", "noisy_loss", "draws", "failed", "format")
# decide the first micro-batch
_OF_FIRST_PASS = {"batch_size", "micro_batch_size", "precision", DATA}
_OF_SETTINGS = ("settings-changed", "length-changed")  # errors about settings of the program


@dataclass(frozen=True)
class OpenedRun:
    """The result of `open_run`. `checkpoint` is None for a new run."""

    checkpoint: Checkpoint | None = None
    state_check: "state_check.StateCheck | None" = None
    loss_contract: "LossContract | None" = None  # of a new run
    is_over: bool = False  # the run has all that its end writes: the session writes nothing
    begun_end: BegunEnd | None = None  # the run is complete, and a kill has cut its end off


def open_run(parts: RunComponents, *, configuration: str | None) -> OpenedRun:
    """Open a run. Rank 0 writes config.toml: `configuration`, or (if None) the script's command and
    settings. Collective.
    """
    parts.follow_trainable()  # parameters frozen since the run was built
    directory = parts.directory
    if directory is None or parts.checkpointing is None:
        if parts.first_changes:
            raise _ramp_without_directory(parts.first_changes[0].setting)
        parts.open_tape(None)
        return _begin(parts)
    if parts.world.is_main:
        _open_directory(directory, parts)
        leave_branches(directory.path)
    checkpoint = parts.checkpointing.newest()
    _refuse_other_journal(directory, parts, checkpoint)
    parts.open_tape(checkpoint)
    accepted: list[dict[str, Any]] = []
    if checkpoint is None:
        opened = _begin_in(directory, parts.checkpointing, parts, configuration)
    else:
        opened = _resume(directory, parts.checkpointing, parts, checkpoint)
        if opened.is_over:
            return opened
        earlier_count = len(checkpoint.saved.fingerprints["accepted"])
        accepted = parts.fingerprints["accepted"][earlier_count:]
        if parts.world.is_main and (configuration is not None or accepted):
            _write_configuration(directory, parts, configuration)
    _begin_journal(directory, parts)
    if parts.rank_log is not None:
        parts.rank_log.open(directory.path / "logs" / f"rank-{parts.world.rank}.log")
    if parts.text_log is not None:
        parts.text_log.open(directory.path / TEXT_LOG)
    if parts.world.is_main:
        _record_session(directory, parts, accepted)
    return opened


def _open_directory(directory: RunDirectory, parts: RunComponents) -> None:
    if not parts.plan.is_new and not directory.path.exists():
        raise _gone(directory)  # before it is made again
    directory.refuse_files_of_others(parts.files)
    directory.open()
    directory.remember("config.toml", CHANGES, *parts.files)
    if not directory.is_locked:
        parts.say(
            f"note: the file system of {directory.shown} has no locks: do not start a second run"
            " there"
        )


def _refuse_other_journal(
    directory: RunDirectory, parts: RunComponents, checkpoint: Checkpoint | None
) -> None:
    """Raise `OtherSettings` if settings were changed since the run was built, or if no
    checkpoint is intact from the step on at which its settings begin. Collective.
    """
    changes = None
    if parts.world.is_main:
        changes = [change.sha256 for change in read_changes(directory.path)]
    if parts.world.from_main(changes) != [change.sha256 for change in parts.changes]:
        refusal = CheckpointError(
            "run-changed-meanwhile",
            problem=f"settings of {directory.shown} were changed after this Run was built",
            reason="the next step would have those before the change",
            remedy="build the Run again",
            run=str(directory.shown),
        )
        raise OtherSettings(None, refusal)
    step = 0 if checkpoint is None else checkpoint.step
    if step < parts.settings_begin:
        refusal = CheckpointError(
            "no-checkpoint-since-change",
            problem=f"no checkpoint of {directory.shown} is intact from step {parts.settings_begin} on,"
            " where its settings begin",
            reason=f"the newest intact one is of step {step}, and a model that is passed as an object"
            " cannot be built again",
            remedy="pass a function that builds the model, or remove the damaged checkpoints after step"
            f" {step}, and start again",
            step=step,
            begin=parts.settings_begin,
        )
        raise OtherSettings(step, refusal)


def _begin_journal(directory: RunDirectory, parts: RunComponents) -> None:
    """Write the changes of ramps into the journal, before any step is made. Collective."""
    if not parts.first_changes:
        return
    written = None
    if parts.world.is_main:
        when = datetime.now(UTC).isoformat(timespec="seconds")
        changes = [replace(change, when=when) for change in parts.first_changes]
        try:
            written = [asdict(change) for change in append_changes(directory.path, changes)]
        except OSError as problem:
            raise run_file_not_written(directory.path / CHANGES, problem) from problem
    numbered = [SettingChange(**values) for values in parts.world.from_main(written)]
    parts.changes = (*parts.changes, *numbered)
    parts.first_changes = ()


def _ramp_without_directory(name: str) -> ConfigError:
    return ConfigError(
        "ramp-without-directory",
        problem=f"{name} changes on the way, and this run has no directory",
        reason="its other values begin from a checkpoint",
        remedy=Setting("run_dir", "DIR"),
        setting=name,
    )


def _record_session(
    directory: RunDirectory, parts: RunComponents, accepted: list[dict[str, Any]]
) -> None:
    """Add this session to the sessions of the run, with the changes that it was told to accept."""
    session = {
        "step": parts.state.step,
        "machine": parts.machine(),
        **environment(),
        "data": parts.plan.identity["data"],
        "workers": parts.pipeline.workers,
        "count_unit": parts.settings.count_unit,
        "settings": parts.of_program,
        "origins": origins_of(parts.of_program, parts.plan.origins),
        "takes_changes": are_built_by_functions(parts.settings.model),
    }
    if parts.plan.auto_precision is not None:
        session["auto"] = {"precision": parts.plan.auto_precision}
    if directory.numbered is not None:
        session["numbered"] = directory.numbered
    if accepted:
        session["accepted_changes"] = accepted
    directory.add_session(session)


def _write_configuration(
    directory: RunDirectory, parts: RunComponents, configuration: str | None
) -> None:
    text = configuration or messages.script_toml(parts.plan.identity)
    directory.write_text("config.toml", with_choices(text, parts.plan.identity))


def _begin(parts: RunComponents) -> OpenedRun:
    """Start a new run: load initial weights, and check buffers, state and loss before step 0."""
    from surefoot.train.state_check import loss_contract, refuse_scored_sums

    message = start_from_init(parts)
    if message is not None:
        parts.say(message)
    if parts.task.loss is not None and parts.pipeline.sizes.pieces > 1:
        with parts.world.during("in the check of buffers"):
            buffer_check(parts).check(parts.task.loss, step=0)
    check = _state_check(parts)
    can_register_more = not parts.run_state.user_state.is_complete
    if check is not None and not can_register_more:
        with parts.world.during("in the check of the state"):
            check.check_beginning(parts.pipeline)
    verdict = None
    if parts.task.loss is not None:
        with parts.world.during("in the check of the loss"), suppress(Exception):
            verdict = loss_contract(parts)  # the first step repeats and explains an error
    refuse_scored_sums(parts, verdict)
    return OpenedRun(None, check, verdict)


def buffer_check(parts: RunComponents) -> BufferCheck:
    """Return the check that finds the rules of buffers."""
    user_state = parts.run_state.user_state.objects
    exact = parts.device.type == "cpu" or parts.settings.deterministic
    return BufferCheck(parts.task, parts.state, parts.pipeline, user_state, exact)


def start_from_init(parts: RunComponents) -> str | None:
    """Load the weights of `init_from` into the models before step 0. Returns a message, or None if
    nothing was loaded.
    """
    if parts.settings.init_from is None or parts.state.step > 0:
        return None
    from surefoot.checkpoint.init_weights import load_initial_weights

    # absolute, whatever the current directory is now
    weights = Path(parts.plan.identity["init_from"])
    look_at(weights, setting="init_from")
    refuse_other_format(weights, shown=parts.settings.init_from)
    message = load_initial_weights(parts.state.models, weights, world=parts.world)
    for name, average in parts.state.ema_models.items():
        average.restart(parts.state.models[name])
    if parts.settings.init_optimizer:
        from surefoot.run.initial_optimizer import take_optimizer_states

        now = parts.plan.identity["optimizer"]
        message += "\n" + take_optimizer_states(parts.state, weights, world=parts.world, now=now)
    return message


def _state_check(parts: RunComponents) -> "state_check.StateCheck | None":
    if not parts.settings.check_state or parts.directory is None or parts.state.step > 0:
        return None
    from surefoot.train import state_check

    exact = parts.device.type == "cpu" or parts.settings.deterministic
    return state_check.StateCheck(
        parts.task, parts.state, parts.run_state.user_state.objects, parts.world, exact
    )


def _begin_in(
    directory: RunDirectory,
    checkpointing: Checkpointing,
    parts: RunComponents,
    configuration: str | None,
) -> OpenedRun:
    from surefoot.train import state_check

    if not parts.plan.is_new:
        raise _gone(directory)
    opened = _begin(parts)
    refuse_lossy(parts.state)
    parts.fingerprints = state_check.fingerprints(parts, at_beginning=True)
    unknown = parts.fingerprints["not_looked_into"]
    if unknown:
        parts.say(
            f"note: {', '.join(unknown)} in samples cannot be inspected: a resume does not detect"
            " their changes"
        )
    if parts.world.is_main:
        _write_configuration(directory, parts, configuration)
        for name, content in parts.files.items():
            directory.write_bytes(name, content.encode() if isinstance(content, str) else content)
    checkpointing.finish(0, parts.packed)
    return opened


def _gone(directory: RunDirectory) -> CheckpointError:
    return CheckpointError(
        "run-gone",
        problem=f"the run that was in {directory.shown} when this Run was built is gone",
        reason="this Run would begin with the learning rates and the precision of that one",
        remedy="build the Run again",
        run=str(directory.shown),
    )


def _resume(
    directory: RunDirectory,
    checkpointing: Checkpointing,
    parts: RunComponents,
    checkpoint: Checkpoint,
) -> OpenedRun:
    """Restore a checkpoint, and repeat the checks of a new run that this session needs."""
    with _naming_commands(directory, parts):
        _restore(parts, checkpointing, checkpoint)
    step = parts.state.step
    check = buffer_check(parts)
    check.refuse_undeclared()  # more ranks than before
    is_unchecked = parts.state.buffers.findings is None  # more micro-batches than before
    if is_unchecked and parts.task.loss is not None and parts.pipeline.sizes.pieces > 1:
        check.check(parts.task.loss, step=step)
    frozen = state_dict.frozen_tensors(parts.state, main=parts.world.is_main)
    checkpointing.resumed(checkpoint, frozen)
    has_final_scores = checkpoint.saved.ended or not parts.evaluator.names(at_end=True)
    state_check = _state_check(parts)
    if not parts.finished or checkpoint.saved.evaluation_due or not has_final_scores:
        return OpenedRun(checkpoint, state_check)
    if parts.world.is_main:
        checkpointing.remove_leftovers()
    begun_end = _begun_end(parts, directory)
    return OpenedRun(checkpoint, state_check, is_over=begun_end is None, begun_end=begun_end)


def _begun_end(parts: RunComponents, directory: RunDirectory) -> BegunEnd | None:
    """Return what a complete run has of its end, or None if its records have all of it.
    Collective.
    """
    from surefoot.tracking.run_records import RunRecords

    facts = None
    if parts.world.is_main:
        records = RunRecords()
        records.extend(read_records(directory.metrics))
        if not records.is_complete:
            step = parts.state.step
            has_sample = records.last_sample is not None and records.last_sample[0] == step
            facts = [has_sample, records.at_end_of_step, records.at_end]
    facts = parts.world.from_main(facts)
    return None if facts is None else BegunEnd(*facts)


def _restore(parts: RunComponents, checkpointing: Checkpointing, checkpoint: Checkpoint) -> None:
    """Restore a checkpoint, and say what differs from it. Raises `CheckpointError` for what a resume
    does not allow.
    """
    from surefoot.train import state_check

    refuse_data_of_earlier_steps(parts, checkpoint)
    parts.refuse_other_settings(checkpoint)
    at_beginning = False
    if state_check.has_small_loss(parts):
        at_beginning = _load_beginning(parts, checkpointing, checkpoint)
    parts.fingerprints = state_check.fingerprints(parts, at_beginning=at_beginning)

    trainable = parts.state.trainable
    flags = trainable.flags
    where = parts.where(checkpoint)
    try:
        state_dict.restore(
            parts.run_state,
            checkpoint,
            where=where,
            main=parts.world.is_main,
            changed=[change.setting for change in parts.changes_since(checkpoint)],
        )
    except OtherModelError as problem:
        problem.reason = "the model of a run cannot change"
        problem.remedies = (ANOTHER_RUN,)
        if _is_untrained(parts, checkpoint):
            problem.reason = "no step was trained yet"
            problem.remedies = (ANOTHER_RUN, f"or delete this one: {_deleting(parts)}")
        raise
    parts.follow_trainable()
    _note_absent_best(parts, checkpointing)
    if not parts.finished:
        for line in trainable.changes(flags):
            parts.say(f"note: {line}, as in the checkpoint")
        for line in parts.notes(checkpoint):
            parts.say(f"note: {line}")
        for change in parts.changes_since(checkpoint):
            parts.say(described(change))
    _warn_of_weights_not_finite(parts, f"step-{checkpoint.step:08d}")
    _warn_of_divergence(parts, checkpoint.step)
    parts.refuse_another_architecture(checkpoint)  # after `restore`, which names mismatched tensors
    _compare_program(parts, checkpoint)


def _note_absent_best(parts: RunComponents, checkpointing: Checkpointing) -> None:
    """Say which of the best checkpoints are no longer there: an older one did not know them all."""
    best = parts.run_state.best
    if best is None or not parts.world.is_main:
        return
    for step in best.steps:
        path = checkpointing.store.path(step)
        if not path.is_dir():
            parts.say(f"note: {path.name}, of the best {best.score}, is no longer on the disk")


@contextmanager
def _naming_commands(directory: RunDirectory, parts: RunComponents) -> Iterator[None]:
    """Let an error name a free directory where a remedy is another run, and this one where it is
    its weights, unless it diverged; and the line that changes a setting on record, if one that can
    change differs from that of the last session.
    """
    try:
        yield
    except CheckpointError as problem:
        free = str(free_directory(directory.shown))
        with suppress(OSError, ValueError, LookupError):
            free = read_sessions(directory.path)[0]["numbered"]
        remedies: list[Remedy] = []
        if problem.code in _OF_SETTINGS:
            wishes: list[str] = []
            with suppress(OSError, ValueError, LookupError):
                before = read_sessions(directory.path)[-1]["settings"]
                wishes = assignments(before, parts.of_program)
            if wishes:
                line = f"surefoot change {shlex.quote(str(directory.shown))} {shlex.join(wishes)}"
                remedies.append(("to change it from here on:", Command(line)))
        if _is_of_data(problem) and parts.plan.identity["data"]["plan"]["order"] in ORDERS:
            had = data_changes(parts.changes)
            if had:
                remedies.append(f"give it the data that it has had since step {max(had)}")
            shown = shlex.quote(str(directory.shown))
            line = f"surefoot change {shown} data='{AT_ONCE}' --because 'more data'"
            remedies.append(("to go on with these data:", Command(line)))
        for remedy in problem.remedies:
            if remedy == ANOTHER_RUN:
                remedies.append(Setting("run_dir", free))
            elif remedy == FROM_ITS_WEIGHTS:
                if divergence_from(directory.path, 0) is not None:
                    continue  # its weights are where the loss left all bounds
                init_from = Setting("init_from", str(directory.shown))
                remedies.append((FROM_ITS_WEIGHTS[0], init_from))
            else:
                remedies.append(remedy)
        problem.remedies = tuple(remedies)
        raise


def _is_of_data(problem: CheckpointError) -> bool:
    """Return True for the refusal of other training data."""
    if problem.code == "data-changed":
        return True
    if problem.code == "program-changed":
        return "data" in problem.fields["changed"]
    return problem.code == "settings-changed" and any(
        line.startswith("data.") for line in problem.fields["changes"]
    )


def _deleting(parts: RunComponents) -> str:
    assert parts.directory is not None
    return f"rm -r {shlex.quote(str(parts.directory.shown))}"


def _warn_of_divergence(parts: RunComponents, step: int) -> None:
    assert parts.directory is not None
    if parts.finished or not parts.world.is_main:
        return
    diverged_step = divergence_from(parts.directory.path, step)
    if diverged_step is None:
        return
    shown = parts.directory.shown
    change = f"surefoot change {shlex.quote(str(shown))} optimizer.lr=..."
    parts.say(
        f"WARNING: this run diverged at step {diverged_step:,}, and the same steps with the same"
        " settings diverge again, unless the cause was in the data or on the machine\n"
        f"  inspect that step: {replay_command(shown, diverged_step)}\n"
        f"  to go on with another setting, such as a lower rate: {change}"
    )


def _warn_of_weights_not_finite(parts: RunComponents, checkpoint: str) -> None:
    """Warn of weights with NaN or infinity. Collective."""
    names_here: list[str] = []  # of several models, two may be equal
    checks: list[Tensor] = []
    for model in parts.state.models.values():
        for path, parameter in model.named_parameters():
            held, _ = local_part(parameter)
            for name, tensor in plain_tensors(path, held.detach()).items():
                if tensor.is_floating_point():
                    names_here.append(name)
                    checks.append(torch.isfinite(tensor).all())
    if not checks:
        return
    are_finite = torch.stack(checks).tolist()  # one read of the device
    not_finite = [name for name, finite in zip(names_here, are_finite, strict=True) if not finite]
    names: set[str] = set()
    for names_of_rank in parts.world.gathered(not_finite):
        names.update(names_of_rank)
    if not names:
        return
    assert parts.directory is not None
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    path_of_checkpoint = shlex.quote(str(parts.directory.checkpoints / checkpoint))
    parts.say(
        f"WARNING: {checkpoint} contains non-finite weights: {min(names)}{more}\n"
        "  every further loss is NaN, so no step will be applied\n"
        f"  to resume from an older checkpoint: rm -r {path_of_checkpoint}"
    )


def _load_beginning(
    parts: RunComponents, checkpointing: Checkpointing, checkpoint: Checkpoint
) -> bool:
    """Load the weights of step 0, with which the loss is compared. Returns False without them."""
    models = {file_name("model", name): (name, model) for name, model in parts.state.models.items()}
    start = checkpoint
    if checkpoint.step > 0:
        try:
            start = checkpointing.at(0, only=[*models, "state"])
        except CheckpointError as problem:
            why = first_line(problem)
            parts.say(f"note: the loss is not compared with the loss at step 0: {why}")
            return False
    try:
        for file, (name, model) in models.items():
            contents.load_model(model, model_state(start, file, name), where="step-00000000")
            for part, module in model.named_modules():
                module.training = part not in start.saved.eval_mode[name]
        state_dict.restore_known(parts.run_state.user_state.objects, start)
    except (CheckpointError, KeyError):  # another model: `restore` names the difference
        return False
    return True


def _is_untrained(parts: RunComponents, checkpoint: Checkpoint) -> bool:
    assert parts.directory is not None
    records = []
    for record in read_records(parts.directory.metrics):
        if record["kind"] == "train":
            records.append(record)
    if any(record.get("targets", 1) for record in records):
        return False
    return checkpoint.step == 0 or bool(records)


def _comparable(
    parts: RunComponents, checkpoint: Checkpoint, now: Mapping[str, Any]
) -> "Fingerprints":
    """Return the fingerprints of the beginning, without those of its first micro-batch if a change
    of settings makes another one.
    """
    before = checkpoint.saved.fingerprints
    names: set[str] = set()
    for change in parts.changes_since(checkpoint):
        names |= change.names
    has_other_model = any(name.startswith("model.") for name in names)
    if not has_other_model and not names & _OF_FIRST_PASS:
        return before
    if not parts.finished and not parts.follows:
        parts.say(
            "note: the loss of this program is not compared with that of the beginning, because its"
            " first micro-batch is another one after the change"
        )
    of_now = {name: now[name] for name in ("micro_batch", *_OF_LOSS) if name in now}
    if DATA in names:
        of_now["samples"] = now["samples"]
        of_now["sources"] = {**before["sources"], "data": now["sources"]["data"]}
    return cast("Fingerprints", {**before, **of_now})


@interprets
def _compare_program(parts: RunComponents, checkpoint: Checkpoint) -> None:
    from surefoot.checkpoint.changes import Change, find_changes, is_elsewhere, refuse_changes

    now = parts.fingerprints
    feedback = parts.run_state.feedback
    steering = [] if feedback is None else [feedback.plateau.score.split("/")[0]]
    before = _comparable(parts, checkpoint, now)
    changes, notes = find_changes(before, now, steering=steering)
    # `refuse_other_settings` ignores these
    now_identity = json.loads(json.dumps(parts.plan.identity))
    saved = with_changed(checkpoint.saved.identity, now_identity, parts.changes_since(checkpoint))
    data_changes = differences({"data": saved["data"]}, {"data": now_identity["data"]})
    if data_changes:
        text = f"the training data set has changed: {data_changes[0]}"
        changes.insert(0, Change(("data",), text))

    is_untrained = parts.world.is_main and _is_untrained(parts, checkpoint)
    refused = changes
    if parts.world.from_main(is_untrained):
        # a mistake that was mended at once; but the weights of step 0 are the old model's
        refused = [change for change in changes if "model" in change.names]
    refuse_changes(refused, accepted=parts.accept_change, where=parts.where(checkpoint))
    if not parts.finished:
        for line in notes:
            parts.say(f"note: {line}")
        for change in changes:
            parts.say(f"note: accepted: {change.text}")

    fingerprints = dict(now)
    accepted = list(before["accepted"])
    if changes:
        names = sorted({name for change in changes for name in change.names})
        texts = [change.text for change in changes]
        accepted.append({"step": checkpoint.step, "changed": names, "what": texts})
    elif is_elsewhere(before, now):  # values of another machine are no reference
        fingerprints = {**before, "sources": now["sources"]}
    elif now["loss"] is None:
        fingerprints |= {name: value for name, value in before.items() if name in _OF_LOSS}
    parts.fingerprints = {**fingerprints, "accepted": accepted}
