"""Start-of-session checks: checkpoints hold all state, and a resumed run computes the same as
before.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from surefoot.checkpoint.nested_state import pack_state
from surefoot.checkpoint.optimizer_state import optimizer_tensors
from surefoot.checkpoint.snapshot import NotPutBackError, Snapshot, changed_values, same_value
from surefoot.config.behavior import BUFFERS_IN_ORDER
from surefoot.config.user_code import text_hashes
from surefoot.data.fingerprints import hash_of, hashes_of_samples
from surefoot.data.loader import MicroBatch
from surefoot.data.pipeline import DataPipeline
from surefoot.distributed.shards import holders, local_part
from surefoot.distributed.strategy import without_ranks
from surefoot.distributed.world import World
from surefoot.errors import ConfigError, Setting
from surefoot.mean import Mean
from surefoot.metrics.multiple_choice import eagerly
from surefoot.optim.kinds.kind import kind_of
from surefoot.seeding import fold, seed_generators
from surefoot.train.compile import sole_or_all
from surefoot.train.components import Components
from surefoot.train.evaluate import Split, mean_loss
from surefoot.train.loop import Loss, State, Step, Task, forward_backward
from surefoot.train.loss_contract import (
    LossContract,
    Pieces,
    check_contract,
    not_checked,
    pieces_of,
    refused_scores,
)
from surefoot.train.precision import FORMATS
from surefoot.train.state_dict import parameter_names
from surefoot.train.step_watch import UNWATCHED, CoupledLoss, Watch
from surefoot.train.weight_check import refuse_written, versions_of

# above this, no loss is compared at a resume, since it needs the weights of step 0
_MAX_WEIGHT_BYTES = 2 << 30


@dataclass
class StateCheck:
    """A check that checkpoints contain all state that the first two steps of a new run change.

    A value that the second of two equal passes changes is state. A value that only the first pass
    changes is a cache. The two passes use step 1, and follow a pass of step 0: a hidden state may
    begin anew in step 0. In a user's own steps, this check runs after step 1. An earlier check
    after step 0 uses only the samples of step 0. `user_state` holds the objects of
    `run.register_state`. The checks are collective and raise `ConfigError`.
    """

    task: Task
    state: State
    user_state: Mapping[str, Any]
    world: World
    exact: bool  # equal passes give equal bits
    inner: Watch = UNWATCHED  # another observer of the step
    has_passed: bool = False
    # of the step so far, by its calls of `forward_backward`
    losses: list[tuple[Loss, MicroBatch]] = field(default_factory=list)
    earlier: list[MicroBatch] = field(default_factory=list)  # of step 0, by the same calls
    # before and after each update of a step
    updates: list[list[Snapshot]] = field(default_factory=list)
    changed: set[str] = field(default_factory=set)  # by the updates of the latest step
    last: Snapshot | None = None  # after the last update of the first step
    written: set[str] = field(default_factory=set)  # weights, by the passes of the check
    steps: int = 2  # number of watched steps

    def check_beginning(self, pipeline: DataPipeline) -> None:
        """Compare passes of the run's own loss before step 0, once per run."""
        if self.task.loss is not None and not self.has_passed:
            self.check_passes((self.task.loss, pipeline.first(), pipeline.first(1)))

    def check_passes(
        self, *passes: tuple[Loss, MicroBatch | None, MicroBatch | None], after_step: bool = False
    ) -> None:
        """Compare the states after two passes of this rank's micro-batch, once per run. If a pass
        fails, the step reports the error.

        The two passes follow a pass of the first micro-batch. They use the second one if every rank
        has one, otherwise the first. Containers that are empty `after_step` are not state: they
        pass values from one loss of a step to another.
        """
        if self.has_passed:
            return
        for loss, micro_batch, later in passes:
            has_first = micro_batch is not None and micro_batch.count > 0
            has_second = later is not None and later.count > 0
            ranks = self.world.gathered((has_first, has_second))
            if micro_batch is None or not all(rank_has_first for rank_has_first, _ in ranks):
                return
            repeated = micro_batch
            if later is not None and all(rank_has_second for _, rank_has_second in ranks):
                repeated = later
            try:
                empty = set()
                if after_step:
                    empty = self._empty_containers(loss)
                changed = self._changed_by_last_pass(loss, [micro_batch, repeated, repeated])
                names = [name for name in changed if name not in empty]
            except NotPutBackError:
                raise
            except Exception:  # in the user's code: the step explains it
                names = []
            self._refuse_unsaved(names, when="in every pass")
            if self.state.buffers.behavior >= BUFFERS_IN_ORDER:
                refuse_written(self.world.gathered(sorted(self.written)), self.state.models)
            self.has_passed = True

    def check_step(self, step: Step) -> None:
        """Check the updates of one of the first two steps, and the passes that a custom loop ran in
        the step.
        """
        step._watch = self.inner
        is_first = step.index == 0
        if is_first:
            self._refuse_optimizer_state()
        changed_before = self.changed
        self.changed = self._changed_by_updates(is_first=is_first)
        if is_first:
            if self.updates:
                self.last = self.updates[-1][-1]
        else:
            changed_twice = [name for name in self.changed if _is_in(name, changed_before)]
            self._refuse_unsaved(sorted(changed_twice), when="in every update")
            self._refuse_unsaved(self._trained_in_body(), when="between two steps")
        self._check_passes_of_loop(is_first=is_first)
        self.losses = []
        self.updates = []

    def _changed_by_updates(self, *, is_first: bool) -> set[str]:
        names = set()
        for before, after in self.updates:
            for value in changed_values(before, after):
                # what the first update makes and the second one changes is state too
                if value.how == "changed" or (is_first and value.how == "appeared"):
                    names.add(value.name)
        return names

    def _check_passes_of_loop(self, *, is_first: bool) -> None:
        has_passed = self.has_passed
        losses = [loss for loss, _ in self.losses]
        micro_batches = [micro_batch for _, micro_batch in self.losses]
        # each call of step 1 follows the same call of step 0, if that step made it
        firsts = self.earlier + micro_batches[len(self.earlier) :]
        self.check_passes(*zip(losses, firsts, micro_batches, strict=False), after_step=True)
        if is_first:
            self.has_passed = has_passed  # step 1 checks again, with the samples of two steps
            self.earlier = micro_batches
        else:
            self.earlier = []

    def _refuse_unsaved(self, names: Sequence[str], *, when: str) -> None:
        _refuse_unsaved(self.world.gathered(names), models=self.state.models, when=when)

    def _refuse_optimizer_state(self) -> None:
        """Raise `CheckpointError` for state of a user's optimizer that a checkpoint cannot hold."""
        for name, trained in self.state.optimizers.items():
            if kind_of(trained.optimizer) is None:
                names = parameter_names(self.state.models[name])
                _, plain, _ = optimizer_tensors(trained.optimizer, names)
                pack_state({name: plain})

    def over(self, loss: Loss, micro_batches: Sequence[MicroBatch]) -> Loss:
        self.losses.append((loss, micro_batches[0]))
        return self.inner.over(loss, micro_batches)

    def before(self, names: Iterable[str], factor: torch.Tensor | float) -> None:
        self.inner.before(names, factor)
        self.updates.append([self._unsaved(self._loss_of_step(), optimizers=True)])

    def after(self, names: Iterable[str]) -> None:
        self.updates[-1].append(self._unsaved(self._loss_of_step(), optimizers=True))
        self.inner.after(names)

    def _loss_of_step(self) -> Any:
        if self.task.loss is not None:
            return self.task.loss
        if not self.losses:
            return None
        loss, _ = self.losses[0]  # of a loop of one's own
        return loss

    def _trained_in_body(self) -> list[str]:
        """Return the names of unsaved parameters, such as those of a loss, that changed between the
        updates of two steps.
        """
        if self.last is None or not self.updates:
            return []
        changed = changed_values(self.last, self.updates[0][0])
        return [
            value.name for value in changed if value.kind == "weight" and value.how == "changed"
        ]

    def _changed_by_last_pass(self, loss: Loss, micro_batches: Sequence[MicroBatch]) -> list[str]:
        models = self.state.models
        task = replace(self.task, loss=loss)
        is_sharded = holders(self.state.parameters) is not None
        if not is_sharded:  # otherwise all ranks gather weights together
            task = replace(task, ranks=without_ranks(task.ranks), forward=sole_or_all(models))
        losses = []
        unsaved = []  # after each pass
        before = Snapshot(
            models,
            loss,
            user_state=self.user_state,
            parameters=self.state.parameters,
            keep=True,
        )
        with before, eagerly():
            for micro_batch in micro_batches:
                # a loss may write into its batch
                batch = replace(micro_batch, batch=deepcopy(micro_batch.batch))
                step = Step(0, [batch], task, State(models, {}))
                versions_before = versions_of(models)
                losses.append(float(forward_backward(step)))
                versions_after = versions_of(models)
                unsaved.append(self._unsaved(loss))
                self.written.update(before.restore(only_saved=True))
        if not is_sharded:  # gathered weights are other tensors
            # the first pass may move weights to other memory, without another effect
            for name, version in versions_before.items():
                if versions_after.get(name) != version:
                    self.written.add(name)
        # a new value may be a cache
        differing = changed_values(*unsaved[-2:])
        changed = [value.name for value in differing if value.how == "changed"]
        first, second = losses[-2:]
        if not changed and not same_value(first, second, exact=self.exact):
            changed = [f"state that the loss depends on ({first:.9g}, then {second:.9g})"]
        return changed

    def _empty_containers(self, loss: Loss) -> set[str]:
        names = set()
        for name, value in self._unsaved(loss).values.items():
            # the content of a container is its type and its length
            if type(value.content) is tuple and value.content[1:] == (0,):
                names.add(name)
        return names

    def _unsaved(self, loss: Loss | None, *, optimizers: bool = False) -> Snapshot:
        """Return what no checkpoint holds, to compare."""
        of_state = None
        if optimizers:
            trained_models = self.state.optimizers.items()
            of_state = {name: trained.optimizer for name, trained in trained_models}
        return Snapshot(
            self.state.models,
            loss,
            of_state,
            user_state=self.user_state,
            saved=False,
            exact=self.exact,
        )


def _is_in(name: str, others: Collection[str]) -> bool:
    """Return True if one of the others is this value or holds it."""
    return any(name == other or name.startswith((f"{other}.", f"{other}[")) for other in others)


def _refuse_unsaved(
    names_by_rank: Sequence[Sequence[str]], *, models: Collection[str], when: str
) -> None:
    """Raise `ConfigError` if an unsaved value changes on any rank. `when` is, for example, "in
    every pass".
    """
    names = list(dict.fromkeys(chain.from_iterable(names_by_rank)))
    if not names:
        return
    also = ""
    if len(names) > 1:
        more = ", ..." if len(names) > 3 else ""
        also = f" (nor {', '.join(names[1:3])}{more})"
    registered = (
        "run.register_state(name, the dict, list or tensor that holds it, and is changed in place,"
        " or an object with state_dict and load_state_dict)"
    )
    cure = f"use {registered}"
    if names[0].partition(".")[0] in models:
        cure = f"use register_buffer, or {registered}"
    raise ConfigError(
        "state-not-saved",
        problem=f"{names[0]} changes {when}, and no checkpoint holds it{also}",
        reason="a killed run would resume without it, and differ from a run that was not killed",
        remedy=[
            cure,
            (Setting("check_state", False), "if nothing depends on it"),
        ],
        names=names,
        when=when,
    )


@dataclass(frozen=True)
class FirstLosses:
    """Losses of the first step's first micro-batch; None if the pass fails. `noisy` is with noise
    added to what the models return: it tells labels apart even if the weights of step 0 give every
    sample the same outputs. `draws` is True if the pass drew random numbers.
    """

    plain: float | None
    noisy: float | None
    draws: bool


def first_losses(
    models: Mapping[str, torch.nn.Module],
    micro_batch: MicroBatch,
    *,
    task: Task,
    user_state: Mapping[str, Any],
) -> FirstLosses:
    """Return the uncompiled losses of the first step's first micro-batch. All state is restored.

    The first step reports the error of a pass that fails. All ranks of a sharded model must call
    this function, because the passes gather weights.
    """
    before = Snapshot(models, task.loss, user_state=user_state, keep=True)
    with before, eagerly():
        plain, draws = _loss_of(models, micro_batch, task=task)
        if plain is None:
            return FirstLosses(None, None, draws)
        before.restore()
        with _noisy_outputs(models):
            noisy, _ = _loss_of(models, micro_batch, task=task)
        return FirstLosses(plain, noisy, draws)


def fails_in_first_step(parts: Components) -> bool:
    """Return True if the loss fails on the first micro-batch of the training data. Returns False if
    that is unknown, as on several ranks, where no rank may make a pass alone.
    """
    if parts.world.size > 1 or parts.task.loss is None:
        return False
    micro_batch = parts.pipeline.beginning()
    if micro_batch is None:
        return False
    user_state = parts.run_state.user_state.objects
    losses = first_losses(parts.state.models, micro_batch, task=parts.task, user_state=user_state)
    return losses.plain is None


def _loss_of(
    models: Mapping[str, torch.nn.Module], micro_batch: MicroBatch, *, task: Task
) -> tuple[float | None, bool]:
    """Return a loss, and True if the pass drew random numbers. No gradient is computed unless the
    loss itself computes gradients.
    """
    assert task.loss is not None  # `fingerprints` has checked this
    state_functions = [torch.get_rng_state]
    if task.precision.device.type == "cuda":
        state_functions.append(torch.cuda.get_rng_state)
    attempts = [False, True]
    if any(_is_sharded(model) for model in models.values()):
        attempts = [False]  # with gradients, FSDP would wait for a backward pass
    for with_gradients in attempts:
        seed_generators(fold(task.key, 0, micro_batch.index))
        states_before = [get_state() for get_state in state_functions]
        try:
            with torch.set_grad_enabled(with_gradients), task.precision.autocast():
                returned = task.loss(sole_or_all(models), micro_batch.batch)
            value = _number_of(returned)
        except Exception:
            continue
        states = [get_state() for get_state in state_functions]
        return value, not all(map(torch.equal, states, states_before))
    return None, False


def _is_sharded(model: torch.nn.Module) -> bool:
    return any(local_part(parameter)[1] is not None for parameter in model.parameters())


def _number_of(returned: Any) -> float:
    """Return the value of what a loss returns."""
    loss = returned[0] if isinstance(returned, tuple) else returned
    if isinstance(loss, Mean):
        loss = loss.value_or(0.0)
    return float(torch.as_tensor(loss).detach())


@contextmanager
def _noisy_outputs(models: Mapping[str, torch.nn.Module]) -> Iterator[None]:
    def noisy(tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.is_floating_point():
            return tensor
        generator = torch.Generator().manual_seed(0)
        noise = torch.randn(tensor.shape, generator=generator)
        return tensor + noise.to(tensor.device, tensor.dtype)

    def with_noise(module: torch.nn.Module, inputs: Any, outputs: Any) -> Any:  # noqa: ARG001
        return tree_map_only(torch.Tensor, noisy, outputs)

    handles = [model.register_forward_hook(with_noise) for model in models.values()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def fingerprints(parts: Components, *, at_beginning: bool) -> dict[str, Any]:
    """Return hashes of samples, the first micro-batch and the user's code, and the loss of that
    micro-batch. Collective.

    A loss is computed only if the models have the weights of step 0 (`at_beginning`) and at most 2
    GiB of weights. All ranks use the same micro-batch, and the values of rank 0 are returned.
    """
    parts.doing("checking the training step")
    pipeline = parts.pipeline
    task = parts.task
    unknown: dict[str, None] = {}
    hashes_of = partial(
        hashes_of_samples, seed=pipeline.seed, gather=pipeline.collate is None, unknown=unknown
    )
    fingerprint: dict[str, Any] = {
        "machine": parts.machine(),
        "format": "bf16" if parts.plan.parallel.gather_dtype == "bf16" else task.precision.name,
        "samples": hashes_of(pipeline.checked),
        "splits": {name: hashes_of(split.data) for name, split in parts.evaluator.splits.items()},
        "micro_batch": None,
        "loss": None,
        "draws": False,
        "failed": False,
        "sources": _hashes_of_code(parts),
        "accepted": [],
    }
    micro_batch = pipeline.beginning()
    if micro_batch is not None:
        with suppress(Exception):  # in methods of the user's objects
            fingerprint["micro_batch"] = {
                "sha256": hash_of(micro_batch.batch, unknown),
                "count": micro_batch.count,
                "samples": len(micro_batch.sample_ids),
            }
    is_possible = at_beginning and has_small_loss(parts)
    if micro_batch is None or micro_batch.count == 0:
        is_possible = False
    if all(parts.world.gathered(is_possible)) and micro_batch is not None:
        user_state = parts.run_state.user_state.objects
        losses = first_losses(parts.state.models, micro_batch, task=task, user_state=user_state)
        fingerprint |= {
            "loss": None if losses.plain is None else repr(losses.plain),
            "noisy_loss": None if losses.noisy is None else repr(losses.noisy),
            "draws": losses.draws,
            "failed": losses.plain is None,
        }
    fingerprint["not_looked_into"] = list(unknown)
    return dict(parts.world.from_main(fingerprint))


def _hashes_of_code(parts: Components) -> dict[str, dict[str, str]]:
    pipeline = parts.pipeline
    loss = parts.task.loss
    of_loss: list[Any] = [loss]
    if isinstance(loss, torch.nn.Module):
        of_loss = list(loss.modules())
    elif isinstance(loss, CoupledLoss):
        of_loss = [loss.encode_fn, loss.loss_fn]
    of_models: dict[type, None] = {}  # in order, each class once
    for model in parts.state.models.values():
        of_models |= dict.fromkeys(type(module) for module in model.modules())
    optimizers = [trained.optimizer for trained in parts.state.optimizers.values()]
    return {
        "loss": text_hashes([*of_loss, pipeline.count]),
        "model": text_hashes(of_models),
        "collate": text_hashes([pipeline.collate]),
        "data": text_hashes(pipeline.code()),
        "optimizer": text_hashes(optimizers),
    }


def has_small_loss(parts: Components) -> bool:
    """Return True if the run has a loss and at most 2 GiB of weights."""
    if parts.task.loss is None:
        return False
    weight_bytes = 0
    for model in parts.state.models.values():
        for parameter in model.parameters():
            weight_bytes += parameter.numel() * parameter.element_size()
    return weight_bytes <= _MAX_WEIGHT_BYTES


def loss_contract(parts: Components) -> LossContract:
    """Check in evaluation mode that a batch's loss is the count-weighted mean over its halves.

    If the check fails, the loss is not a mean over the counted targets, or the loss couples
    samples. Gradients then depend on the micro-batch size. Each rank checks the first half of its
    own first micro-batch or, if that cannot be cut, of the first batch of a split that the loss
    scores. Collective.
    """
    loss = parts.task.loss
    if loss is None:
        return not_checked("this run has no loss function")
    if isinstance(loss, CoupledLoss):
        return not_checked("the loss is one of the whole batch, for any micro-batch size")
    pieces = _pieces(parts)
    if pieces is None:
        return not_checked(
            "a batch must hold tensors of one length, and two samples or more, to be split in two"
        )
    return _contract_of(parts, loss, pieces)


def _contract_of_split(parts: Components, split: Split) -> LossContract:
    """Check the loss of a split's own, `Split(loss=)`, over the split's first batch. Collective."""
    for batch in parts.evaluator.first_batches(split, at_least=2):
        pieces = pieces_of(batch, parts.pipeline.count)
        if pieces is not None:
            return _contract_of(parts, split.loss, pieces)
    return not_checked("the batch cannot be cut in two")


def refuse_scored_sums(parts: Components, contract: LossContract | None) -> None:
    """Raise `ConfigError` if a split is scored with a loss that is not a mean: the run's, whose
    `contract` was checked, or the split's own. Collective.
    """
    splits = parts.evaluator.splits
    if contract is not None and not contract.holds:
        scored = [name for name, split in splits.items() if split.loss is True]
        if scored:
            raise refused_scores(contract, scored)
    for name, split in splits.items():
        if callable(split.loss) and not isinstance(split.loss, CoupledLoss):
            of_split = None
            with suppress(Exception):  # the first evaluation repeats and explains the error
                of_split = _contract_of_split(parts, split)
            if of_split is not None and not of_split.holds:
                raise refused_scores(of_split, [name])


def _pieces(parts: Components) -> Pieces | None:
    first = parts.pipeline.first()
    pieces = None
    if first is not None:
        pieces = pieces_of(first, parts.pipeline.count)
    if all(parts.world.gathered(pieces is not None)):
        return pieces
    for split in parts.evaluator.splits.values():
        if split.loss is True:
            for batch in parts.evaluator.first_batches(split, at_least=2):  # the same on every rank
                return pieces_of(batch, parts.pipeline.count)
    return None


def _contract_of(parts: Components, loss: Any, pieces: Pieces) -> LossContract:
    state = parts.state
    for model in state.models.values():
        for parameter in model.parameters():
            if not (parameter.is_floating_point() or parameter.is_complex()):
                # bitsandbytes converts its weights for the CPU in a pass in evaluation mode
                return not_checked("the model has quantized weights")
    is_sharded = parts.plan.parallel.kind == "fsdp"
    forward = parts.task.forward if is_sharded else sole_or_all(state.models)
    before = Snapshot(
        state.models,
        loss,
        user_state=parts.run_state.user_state.objects,
        parameters=state.parameters,
        keep=True,
    )

    def mean_of(piece: MicroBatch, seed: int) -> Mean | None:
        precision = parts.run_state.precision
        mean = mean_loss(forward, piece, loss, precision=precision, seed=parts.pipeline.seed + seed)
        before.restore()  # as in a step: each micro-batch starts from the same buffers
        return mean

    with before, parts.numerics():
        tolerance = FORMATS[parts.plan.precision].tolerance
        return check_contract(mean_of, pieces, tolerance=tolerance, gathered=parts.world.gathered)
