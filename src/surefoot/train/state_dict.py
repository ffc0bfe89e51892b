"""Conversion of a run's state at one step to a checkpoint and back."""

from collections.abc import Callable, Collection, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from surefoot.checkpoint import module_state
from surefoot.checkpoint.format import Checkpoint
from surefoot.checkpoint.manifest import Base, Pieces, bounds
from surefoot.checkpoint.nested_state import join_state, pack_state, restore_object
from surefoot.checkpoint.optimizer_state import (
    OWN,
    group_numbers,
    load_group_numbers,
    load_optimizer,
    optimizer_tensors,
)
from surefoot.checkpoint.reader import interprets
from surefoot.checkpoint.state_json import PlateauState, SavedState
from surefoot.checkpoint.tensor_file import host_copy, rows_in_memory
from surefoot.data.batch_lists import BatchLists
from surefoot.data.data_values import DataValues
from surefoot.distributed.shards import Rows, name_of, rows_of
from surefoot.errors import CheckpointError, Setting
from surefoot.optim.build import RunOptimizer
from surefoot.optim.lr_multipliers import FROZEN
from surefoot.train.loop import State
from surefoot.train.meter import Meter
from surefoot.train.model_weights import PRECISE, file_name, load_models, models_of
from surefoot.train.patience import Best, Feedback, PlateauProgress, ScoreWatch, load_stopping
from surefoot.train.precision import Precision
from surefoot.train.timer import Clock

if TYPE_CHECKING:
    from surefoot.checkpoint.frozen import Frozen
    from surefoot.optim.ema import EmaModel

Bases = Callable[[int, "Frozen"], Collection[Base]]  # `FrozenTensors.bases`


@dataclass
class UserState:
    """The user's registered objects, and saved state that no object has claimed yet."""

    objects: dict[str, Any] = field(default_factory=dict)
    tensors: Mapping[str, Tensor] = field(default_factory=dict)
    unclaimed: dict[str, Any] = field(default_factory=dict)
    is_complete: bool = False  # no further object is registered before the first step

    def add(self, name: str, stateful: Any) -> None:
        """Register an object, and restore its state if the checkpoint contains state of this
        name.
        """
        self.objects[name] = stateful
        if name in self.unclaimed:
            restore_object(stateful, self.tensors, self.unclaimed.pop(name), name=name)
        pack_state({name: stateful})  # refuses an unsupported object here, not at the first save

    def refuse_unclaimed(self) -> None:
        """Raise `CheckpointError` if saved state was not claimed by an object: the next checkpoint
        would lose it.
        """
        if self.unclaimed:
            names = list(self.unclaimed)
            raise CheckpointError(
                "registered-state-unclaimed",
                problem="the checkpoint holds registered state that no object restores:"
                f" {', '.join(names)}",
                remedy=f"call run.register_state({names[0]!r}, ...) before the loop",
                names=names,
            )


@dataclass(frozen=True)
class RunState:
    """The state that changes during a run."""

    state: State
    precision: Precision
    best: Best | None = None  # the checkpoints that are kept for their score
    stopping: Sequence[ScoreWatch] = ()  # the rules of early stopping
    feedback: Feedback | None = None  # learning-rate reduction by scores
    meter: Meter = field(default_factory=Meter)
    clock: Clock = field(default_factory=Clock)
    user_state: UserState = field(default_factory=UserState)
    # parameters with a nonzero gradient in any watched step
    updated_parameters: set[str] = field(default_factory=set)
    data_values: DataValues = field(default_factory=lambda: DataValues({}))
    batch_lists: BatchLists | None = None  # of a sampler

    @property
    def watches(self) -> "list[Best | ScoreWatch]":
        """What new scores may change: the best checkpoints, and the patience of each rule."""
        if self.best is None:
            return [*self.stopping]
        return [self.best, *self.stopping]

    @property
    def out_of_patience(self) -> bool:
        """True if early stopping has ended the run."""
        return any(rule.exhausted for rule in self.stopping)

    def is_finished(self, last_step: int) -> bool:
        """Return True if the run has reached its last step or early stopping has ended it."""
        return self.state.step >= last_step or self.out_of_patience


def packed(
    run_state: RunState,
    *,
    main: bool = True,
    bases: Bases | None = None,
    for_this_rank: bool = False,
    **facts: Any,
) -> Checkpoint:
    """Copy the run state to the host as a checkpoint. Waits for the device.

    Each rank copies the rows that it saves; rank 0 (`main`) also copies replicated state. `facts`
    describe the run as JSON. `bases` returns the older checkpoints of the frozen tensors that are
    left out. Without `bases`, all tensors are copied. With `for_this_rank`, the checkpoint is not
    for a disk: `restore` of this rank alone takes it.
    """
    main = main or for_this_rank
    state = run_state.state
    for trained in state.optimizers.values():
        trained.rates.follow()
    for name, average in state.ema_models.items():
        average.refresh(state.models[name])

    used_bases: list[Base] = []
    if bases is not None:
        frozen = frozen_tensors(state, main=main)
        if frozen:
            used_bases = list(bases(state.step, frozen))

    # by file: what this rank holds, and the rows of what is sharded
    tensors: dict[str, Mapping[str, Tensor]] = {}
    rows: dict[str, Mapping[str, Rows]] = {}
    models: dict[str, module_state.ModelState] = {}
    for kind, name, model in models_of(state):
        file = file_name(kind, name)
        in_bases: set[str] = set()
        for base in used_bases:
            in_bases.update(base.tensors.get(file, ()))
        models[file] = module_state.model_tensors(model, include_unsharded=main, without=in_bases)
        tensors[file] = models[file].tensors
        rows[file] = models[file].rows
    for name, average in state.ema_models.items():
        if average.precise:
            file = file_name(PRECISE, name)
            names = parameter_names(state.models[name])
            tensors[file], rows[file] = _precise_tensors(average, names, include_unsharded=main)
    optimizer_states: dict[str, Any] = {}
    for name, trained in state.optimizers.items():
        file = file_name("optimizer", name)
        names = parameter_names(state.models[name])
        tensors[file], optimizer_states[name], rows[file] = optimizer_tensors(
            trained.optimizer, names, include_unsharded=main
        )

    pieces: Pieces | None = None
    files: dict[str, dict[str, Any]]
    if for_this_rank:
        files = _with_rows_of_rank(tensors, rows)
    else:
        files, pieces = _divided(tensors, rows)
    if not main:
        return Checkpoint(state.step, {}, pieces=pieces)
    files["state"], nested = _state_file(run_state, optimizer_states)
    best = run_state.best
    saved = SavedState(
        **facts,
        **nested,
        aliases={name: models[file_name("model", name)].aliases for name in state.models},
        extra={file: model.extra for file, model in models.items()},
        trainable=state.trainable.state(),
        eval_mode={name: _names_in_eval_mode(model) for name, model in state.models.items()},
        monitor=None if best is None else best.watch.state(),
        runners_up=None if best is None else best.state(),
        stopping=[rule.state() for rule in run_state.stopping],
        plateau=_plateau_state(run_state),
        skipped_in_a_row=run_state.meter.skipped_in_a_row,
        clock=run_state.clock.state(),
        seen=sorted(run_state.updated_parameters),
        data_values=run_state.data_values.state(),
        average_updates={
            name: average.updates for name, average in state.ema_models.items() if average.updates
        },
        buffers=state.buffers.findings_to_save(),
        epoch=run_state.meter.epoch_state(),
    )
    return Checkpoint(state.step, files, saved.to_json(), pieces=pieces, bases=used_bases)


def _plateau_state(run_state: RunState) -> PlateauState | None:
    """Return the state of the plateau rule, or the factor that a rule of earlier steps has left."""
    factor = run_state.state.lr_factor
    if run_state.feedback is not None:
        return run_state.feedback.state()
    if factor == 1.0:
        return None
    return PlateauState(factor=factor, best=None, waited=0, cooling=0, not_numbers=0, step=0)


def _state_file(
    run_state: RunState, optimizer_states: Mapping[str, Any]
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return copies of the tensors of the file "state", and the fields of `SavedState` that refer
    to them.
    """
    optimizers = run_state.state.optimizers
    by_prefix: dict[str, Mapping[str, Tensor]] = {
        "precision": run_state.precision.tensors(),
        "meter": run_state.meter.tensors(),
        "bad_in_a_row": {name: trained.bad_in_a_row for name, trained in optimizers.items()},
    }
    groups = {}
    rates = {}
    for name, trained in optimizers.items():
        by_prefix[f"clipping/{name}"] = trained.clipping.remembered
        groups[name] = group_numbers(trained.optimizer)
        if trained.rates.follows:
            rates[name] = trained.rates.state()

    nested: dict[str, Any] = {"epoch_list": None}
    by_prefix["kept"], nested["user_state"] = pack_state(run_state.user_state.objects)
    if run_state.batch_lists is not None:
        step = run_state.state.step
        by_prefix["sampler"], nested["epoch_list"] = run_state.batch_lists.state(step)
    by_prefix["optimizer"], nested["optimizer"] = pack_state(optimizer_states)
    by_prefix["groups"], nested["param_groups"] = pack_state(groups)
    by_prefix["rates"], nested["rates"] = pack_state(rates)

    copies = {}
    for prefix, tensors in by_prefix.items():
        for name, tensor in tensors.items():
            copies[f"{prefix}/{name}"] = host_copy(tensor)
    return copies, nested


def _names_in_eval_mode(model: nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if not module.training]


def frozen_tensors(state: State, *, main: bool) -> "Frozen":
    """Return the frozen parameters that this rank saves, by file and name: of models, and of their
    averages.
    """
    files = {}
    frozen = {name: module_state.frozen_names(model) for name, model in state.models.items()}
    for kind, name, model in models_of(state):
        if frozen[name]:
            tensors = module_state.local_tensors(model, frozen[name])
            if not main:
                tensors = {key: each for key, each in tensors.items() if each[1] is not None}
            if tensors:
                files[file_name(kind, name)] = tensors
    return files


def _with_rows_of_rank(
    by_file: Mapping[str, Mapping[str, Tensor]], rows: Mapping[str, Mapping[str, Rows]]
) -> dict[str, dict[str, Any]]:
    """Return the tensors by file, the sharded ones as if they were complete."""
    files: dict[str, dict[str, Any]] = {}
    for file, tensors in by_file.items():
        files[file] = dict(tensors)
        for name, of_rank in rows[file].items():
            files[file][name] = rows_in_memory(tensors[name], of_rank.start, of_rank.shape)
    return files


def _divided(
    by_file: Mapping[str, Mapping[str, Tensor]], rows: Mapping[str, Mapping[str, Rows]]
) -> tuple[dict[str, dict[str, Tensor]], Pieces | None]:
    """Return the replicated tensors, and the rows that this rank saves of the sharded ones."""
    all_rows = list(chain.from_iterable(of_file.values() for of_file in rows.values()))
    if not all_rows or all_rows[0].group.size() == 1:
        return {file: dict(tensors) for file, tensors in by_file.items()}, None
    rank = all_rows[0].group.rank()
    count = all_rows[0].group.size()
    for file, of_file in rows.items():
        for name, of_rank in of_file.items():
            if (of_rank.start, of_rank.stop) != bounds(of_rank.shape[0], rank, count):
                raise CheckpointError(
                    "parameter-not-sharded-by-rows",
                    problem=f"cannot save {file}: {name} is not sharded over the ranks by equal"
                    " rows",
                    remedy=[
                        "let the module's state_dict return its parameters unchanged",
                        Setting("parallel", "ddp"),
                    ],
                    file=file,
                    parameter=name,
                )
    replicated: dict[str, dict[str, Tensor]] = {}
    sharded: dict[str, dict[str, Tensor]] = {}
    shapes: dict[str, dict[str, tuple[int, ...]]] = {}
    for file, tensors in by_file.items():
        of_file = rows[file]
        replicated[file] = {name: each for name, each in tensors.items() if name not in of_file}
        sharded[file] = {name: tensors[name] for name in of_file}
        shapes[file] = {name: of_rank.shape for name, of_rank in of_file.items()}
    if all_rows[0].replica > 0:
        return replicated, None
    return replicated, Pieces(rank, count, shapes, sharded)


@interprets
def restore(
    run_state: RunState,
    checkpoint: Checkpoint,
    *,
    where: str,
    main: bool = True,
    changed: Collection[str] = (),
) -> None:
    """Restore the state that `packed` copied, on any number of ranks. Settings that were `changed`
    since then keep their present values. Raises `CheckpointError` if the state does not fit.
    """
    freezes = any(name.rpartition(".")[2] == FROZEN for name in changed)
    _refuse_other_files(
        run_state.state,
        checkpoint,
        where=where,
        has_other_averages="ema" in changed,
        averages_others=freezes,
    )
    saved = checkpoint.saved
    state = run_state.state
    loose = checkpoint.tensors("state")
    # first: averages of new parameters start over
    trainable = state.trainable.after_change(saved.trainable) if freezes else saved.trainable
    state.trainable.load_state(trainable, where=where)
    checks = load_models(state, checkpoint, where=where)
    for name, model in state.models.items():
        for module_name, module in model.named_modules():
            module.training = module_name not in saved.eval_mode[name]
    for name in state.optimizers:
        _restore_optimizer(state, name, checkpoint, changed=changed)
    for check in checks:
        check()
    _restore_averages(state, checkpoint, where=where, averages_others=freezes)
    state.buffers.load_findings(saved.buffers)

    if "precision" not in changed:  # a loss scale begins anew
        run_state.precision.load_tensors(_under("precision/", loose))
    run_state.meter.load_tensors(_under("meter/", loose))
    if not main:  # rank 0 holds the logged values of all ranks
        run_state.meter.logged = []
    run_state.meter.skipped_in_a_row = list(saved.skipped_in_a_row)
    run_state.meter.load_epoch(saved.epoch)
    run_state.clock.load_state(saved.clock)
    run_state.updated_parameters.clear()
    run_state.updated_parameters.update(saved.seen)

    _restore_scores(run_state, saved, step=checkpoint.step, plateau_changed="plateau" in changed)
    run_state.user_state.tensors = _under("kept/", loose)
    run_state.user_state.unclaimed = dict(saved.user_state)
    run_state.data_values.load_state(saved.data_values or {})
    if run_state.batch_lists is not None:
        run_state.batch_lists.load_state(_under("sampler/", loose), saved.epoch_list)
    for name, stateful in list(run_state.user_state.objects.items()):
        run_state.user_state.add(name, stateful)
    state.step = checkpoint.step


def _restore_optimizer(
    state: State, name: str, checkpoint: Checkpoint, *, changed: Collection[str]
) -> None:
    """Restore the optimizer of a model, with its clipping."""
    saved = checkpoint.saved
    trained = state.optimizers[name]
    loose = checkpoint.tensors("state")
    tensors = checkpoint.files[file_name("optimizer", name)]
    nested = join_state(saved.optimizer[name], _under("optimizer/", loose))
    built = group_numbers(trained.optimizer)
    numbers = join_state(saved.param_groups[name], _under("groups/", loose))
    rates = _rates_of(name, saved, loose)
    parts = _changed_parts(name, changed)
    names = parameter_names(state.models[name])
    trained_before = state.trainable.trained_in(saved.trainable)[name]
    if "weight_decay" in parts or FROZEN in parts:
        assert trained.former_places is not None  # an optimizer of ours
        places = trained.former_places(trained_before, len(numbers))
        numbers = _regrouped(places, numbers, new=built)
        if rates is not None:
            new = trained.rates.state()
            rates = {
                key: _regrouped(places, of_groups, new=new[key]) for key, of_groups in rates.items()
            }
    state_of_new: dict[Tensor, Any] = {}  # with which they were built
    if FROZEN in parts:
        by_name = {name_of(parameter, names): parameter for parameter in trained.parameters}
        tensors = _of_parameters(by_name, tensors)
        nested = _of_parameters(by_name, nested)
        for joining, parameter in by_name.items():
            if joining not in trained_before and parameter in trained.optimizer.state:
                state_of_new[parameter] = trained.optimizer.state[parameter]
    # first: the `state_dict` of a wrapper has the groups of the optimizer inside
    load_group_numbers(trained.optimizer, numbers)
    load_optimizer(trained.optimizer, tensors, nested, names)
    trained.optimizer.state.update(state_of_new)
    trained.rates.load_state(rates)
    _keep_changed(trained, built, parts)
    device = trained.bad_in_a_row.device  # the device of the weights, possibly the CPU
    trained.bad_in_a_row = loose[f"bad_in_a_row/{name}"].to(device)
    remembered = _under(f"clipping/{name}/", loose)
    if "clip" not in changed:
        trained.clipping.remembered = {key: each.to(device) for key, each in remembered.items()}


def _of_parameters(trained: Collection[str], entries: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries of an optimizer without those of parameters that it no longer trains."""
    kept = {}
    for key, entry in entries.items():
        if key == OWN or key.rpartition("/")[0] in trained:
            kept[key] = entry
    return kept


def _restore_averages(
    state: State, checkpoint: Checkpoint, *, where: str, averages_others: bool
) -> None:
    """Restore the averages whose weights are loaded, and begin those that the checkpoint does not
    have.
    """
    saved = checkpoint.saved
    for name, average in state.ema_models.items():
        if file_name("ema", name) not in checkpoint.files:
            average.restart(state.models[name])
            continue
        if average.precise:
            precise = checkpoint.files.get(file_name(PRECISE, name), {})
            names = parameter_names(state.models[name])
            _load_precise(average, precise, names, where=where, averages_others=averages_others)
        average.load((saved.average_updates or {}).get(name, 0))


def _restore_scores(
    run_state: RunState, saved: SavedState, *, step: int, plateau_changed: bool
) -> None:
    """Restore what the run has concluded from its scores so far."""
    if run_state.best is not None:
        run_state.best.load_state(saved.monitor, saved.runners_up)
    load_stopping(run_state.stopping, saved.stopping, monitor=saved.monitor)
    feedback = run_state.feedback
    rule_before = saved.identity.get("plateau")
    factor = 1.0 if saved.plateau is None else saved.plateau["factor"]
    if feedback is None:
        # of a rule that was taken away
        run_state.state.lr_factor = factor if plateau_changed or rule_before is None else 1.0
        return
    monitor_before = None if rule_before is None else rule_before["monitor"]
    if plateau_changed and monitor_before != feedback.plateau.monitor:
        feedback.standing = PlateauProgress(factor=factor, step=step)
    else:
        feedback.load_state(saved.plateau)
    run_state.state.lr_factor = feedback.standing.factor


def _changed_parts(model: str, changed: Collection[str]) -> list[str]:
    """Return the settings of the optimizer of a model that were changed."""
    parts = []
    for name in changed:
        prefix, _, part = name.rpartition(".")
        if prefix in ("optimizer", f"optimizer.{model}"):
            parts.append(part)
    return parts


def _regrouped(
    places: Sequence[int | None], of_groups: Sequence[Any], *, new: Sequence[Any]
) -> list[Any]:
    """Return what a checkpoint has of each group, for the present groups, whose `places` there may
    be others: with a decay, parameters that it spares are apart. `new` has that of new groups.
    """
    regrouped = []
    for index, place in enumerate(places):
        regrouped.append(deepcopy(new[index] if place is None else of_groups[place]))
    return regrouped


def _keep_changed(
    trained: RunOptimizer, built: Sequence[Mapping[str, Any]], parts: Collection[str]
) -> None:
    """Put back the numbers with which an optimizer was built, where these were changed."""
    for part in parts:
        if part == FROZEN:
            continue
        if part == "lr" or part.endswith("_lr"):
            trained.rates.use_initial()
            continue
        if not any(part in numbers for numbers in built):
            raise CheckpointError(
                "change-not-of-a-group",
                problem=f"optimizer.{part} was changed, and no parameter group of the optimizer has"
                " it",
                remedy=("change it back:", Setting(f"optimizer.{part}")),
                setting=f"optimizer.{part}",
            )
        for group, numbers in zip(trained.optimizer.param_groups, built, strict=True):
            if part in numbers:
                group[part] = numbers[part]


def _refuse_other_files(
    state: State,
    checkpoint: Checkpoint,
    *,
    where: str,
    has_other_averages: bool,
    averages_others: bool,
) -> None:
    expected = {file_name(kind, name) for kind, name, _ in models_of(state)}
    expected |= {file_name("optimizer", name) for name in state.optimizers}
    for name, average in state.ema_models.items():
        if average.precise:
            expected.add(file_name(PRECISE, name))
    of_averages: set[str] = set()
    for name in state.models:
        if has_other_averages:  # they may begin or end here
            of_averages.add(file_name("ema", name))
        if has_other_averages or averages_others:
            of_averages.add(file_name(PRECISE, name))
    if (expected | {"state"}) - of_averages != set(checkpoint.files) - of_averages:
        found = sorted(checkpoint.files)
        needed = sorted(expected)
        raise CheckpointError(
            "checkpoint-of-other-files",
            problem=f"its files are {', '.join(found)}; this run needs {', '.join(needed)}",
            found=found,
            needed=needed,
        ).inside(f"cannot resume {where}")


def _precise_tensors(
    average: "EmaModel", names: Mapping[Tensor, str], *, include_unsharded: bool
) -> tuple[dict[str, Tensor], dict[str, Rows]]:
    tensors = {}
    rows = {}
    for parameter, tensor in average.precise.items():
        name = name_of(parameter, names)
        of_rank = rows_of(parameter)
        if of_rank is not None:
            rows[name] = of_rank
        if include_unsharded or of_rank is not None:
            tensors[name] = host_copy(tensor)
    return tensors, rows


def _load_precise(
    average: "EmaModel",
    saved: module_state.Saved,
    names: Mapping[Tensor, str],
    *,
    where: str,
    averages_others: bool,
) -> None:
    of_run = {name_of(parameter, names): parameter for parameter in average.precise}
    if of_run.keys() != saved.keys() and not averages_others:
        other = min(of_run.keys() ^ saved.keys())
        raise CheckpointError(
            "average-of-other-parameters",
            problem="it does not average the same parameters as this run",
            reason=f"{other} is in one of the two only",
            remedy="choose another run_dir",
            parameter=other,
        ).inside(f"cannot resume {where}")
    for name, parameter in of_run.items():
        tensor = parameter.detach()  # frozen until now
        if name in saved:
            tensor = module_state.read_rows(saved[name], rows_of(parameter))
        average.precise[parameter].copy_(tensor)


def restore_known(objects: Mapping[str, Any], checkpoint: Checkpoint) -> None:
    """Restore the user's objects that a checkpoint holds. Raises `CheckpointError` if an object
    does not restore its state.
    """
    tensors = _under("kept/", checkpoint.tensors("state"))
    saved = checkpoint.saved.user_state
    for name in [name for name in objects if name in saved]:
        restore_object(objects[name], tensors, saved[name], name=name)


def parameter_names(model: nn.Module) -> dict[Tensor, str]:
    """Return the name of each parameter of a model."""
    return {parameter: name for name, parameter in model.named_parameters()}


def _rates_of(name: str, saved: SavedState, loose: Mapping[str, Tensor]) -> Any:
    """Return what the body wrote to the rates of an optimizer, or None if it wrote nothing."""
    rates = (saved.rates or {}).get(name)
    if rates is None:
        return None
    return join_state(rates, _under("rates/", loose))


def _under(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {
        name.removeprefix(prefix): tensor
        for name, tensor in tensors.items()
        if name.startswith(prefix)
    }
