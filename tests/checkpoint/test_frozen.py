"""Frozen parameters are written once: by the first checkpoint, and again only if their bits have
changed.
"""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import surefoot as sf
from forged import checkpoint as checkpoint_dir
from medium import NEEDS_ROOM, Faulty, failing, killed_for_real
from refused import refused
from same_bits import assert_same_bits, tensors_of
from stated import numbers_in
from surefoot.checkpoint import Checkpoint, Store
from surefoot.checkpoint.filesystem import Disk
from surefoot.checkpoint.format import DamageError
from surefoot.checkpoint.frozen import FrozenTensors
from surefoot.checkpoint.manifest import MANIFEST, Base, Manifest, from_bytes, to_bytes
from surefoot.checkpoint.reader import read, read_bases, verify
from surefoot.distributed.world import World
from surefoot.errors import CheckpointError

LAST = 8
HEAD = {"head.weight", "head.bias", "passes"}
FROZEN = {"trunk.weight", "trunk.bias", "table"}
Body = Callable[[int, nn.Module], None]


class Net(nn.Module):
    """A frozen trunk, a frozen table that is tied to a second name, a buffer and a trained head."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(6, 40)
        self.head = nn.Linear(40, 1)
        self.table = nn.Parameter(torch.randn(5, 3))
        self.again = self.table
        self.register_buffer("passes", torch.zeros(()))
        self.requires_grad_(False)
        self.head.requires_grad_(True)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.passes += 1
        return self.head(torch.tanh(self.trunk(x))) + self.table.sum()


def loss(model: nn.Module, batch: Any) -> Tensor:
    return (model(batch[0]) - batch[1]).square().mean()


def build(run_dir: Path | None, **changes: Any) -> sf.Run:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(32, 6, generator=generator)
    y = torch.randn(32, 1, generator=generator)
    settings: dict[str, Any] = {
        "model": Net,
        "loss": loss,
        "train_data": (x, y),
        "optimizer": sf.optim.adamw(lr=0.05),
        "length": f"{LAST} steps",
        "batch_size": 4,
        "save_every": "2 steps",
        "keep_last": 2,
        "ema": 0.9,
        "run_dir": run_dir,
        "device": "cpu",
        "console": False,
        "report": False,
        "tensorboard": False,
    }
    return sf.Run(**(settings | changes))


def train(run: sf.Run, body: Body = lambda _, __: None) -> sf.Run:
    with run:
        for step in run:
            body(step.index + 1, run.state.model)
    return run


def written_names(run: Path, step: int, file: str = "model") -> set[str]:
    """The names of the tensors that a checkpoint has in its own file."""
    return set(load_file(checkpoint_dir(run, step) / f"{file}.safetensors"))


def format_version(run: Path, step: int) -> int:
    manifest = json.loads((checkpoint_dir(run, step) / MANIFEST).read_text())
    return int(manifest["format_version"])


def bases_of(run: Path, *steps: int) -> list[set[int]]:
    return [read_bases(checkpoint_dir(run, step)) for step in steps]


def read_tensors(run: Path, step: int) -> dict[str, Tensor]:
    """All tensors of a checkpoint without the meter's, which are times."""
    tensors = tensors_of(Store(run / "checkpoints").at(step))
    return {name: tensor for name, tensor in tensors.items() if "state/meter" not in name}


def assert_frozen_values(model: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    """The frozen tensors of a model's state are those in the model file of a checkpoint."""
    for name in FROZEN:
        assert torch.equal(model[name], expected[f"model/{name}"]), name


def test_a_checkpoint_has_what_changes_and_refers_to_the_first_one_for_the_rest(
    tmp_path: Path,
) -> None:
    train(build(tmp_path))

    first = read_tensors(tmp_path, 0)
    assert written_names(tmp_path, 0) == written_names(tmp_path, 0, "ema") == HEAD | FROZEN
    assert format_version(tmp_path, 0) == 5
    for step in (6, 8):
        assert written_names(tmp_path, step) == written_names(tmp_path, step, "ema") == HEAD
        assert bases_of(tmp_path, step) == [{0}]
        assert format_version(tmp_path, step) == 7
        assert verify(checkpoint_dir(tmp_path, step)) == []
        tensors = read_tensors(tmp_path, step)
        for name in FROZEN:
            assert torch.equal(tensors[f"model/{name}"], first[f"model/{name}"])
            assert torch.equal(tensors[f"ema/{name}"], first[f"model/{name}"])
    assert sf.load(build(tmp_path)).verify().exit_status == 0


def test_a_run_without_frozen_parameters_refers_to_nothing(tmp_path: Path) -> None:
    train(build(tmp_path, model=lambda: nn.Linear(6, 1), length="2 steps"))

    assert bases_of(tmp_path, 2) == [set()]
    assert format_version(tmp_path, 2) == 5


def unfreeze(step: int, model: nn.Module) -> None:
    if step == 3:
        model.get_submodule("trunk").requires_grad_(True)


def freeze(step: int, model: nn.Module) -> None:
    if step in (1, 3):
        model.get_submodule("trunk").requires_grad_(step == 1)


def rewrite(step: int, model: nn.Module) -> None:
    if step == 3:  # as loops of momentum encoders do, unseen by torch's version counters
        model.get_parameter("trunk.weight").data.mul_(0.5)
        model.get_parameter("trunk.bias").data = model.get_parameter("trunk.bias").data + 1.0


def rewrite_always(step: int, model: nn.Module) -> None:
    model.get_parameter("trunk.weight").data.mul_(0.99)


@dataclass(frozen=True)
class Way:
    """What a body does with the trunk, which of its tensors change, and the checkpoint to which
    later ones refer for these; None: each has its own.
    """

    body: Body
    changed: set[str]
    base: int | None


TRUNK = {"trunk.weight", "trunk.bias"}
WAYS = [
    Way(unfreeze, TRUNK, base=None),
    Way(freeze, TRUNK, base=4),
    Way(rewrite, TRUNK, base=4),
    Way(rewrite_always, {"trunk.weight"}, base=None),
]


@pytest.mark.fast("unfreeze-9", "freeze-1", "rewrite-9", "rewrite_always-1")
@pytest.mark.parametrize("keep_last", [1, 9])
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.body.__name__)
def test_what_changes_later_is_written_and_a_resume_at_any_save_ends_in_the_same_bits(
    way: Way, keep_last: int, tmp_path: Path
) -> None:
    whole = tmp_path / "whole"
    if way.base is None:
        bases = {0}
        written = HEAD | way.changed
    else:
        bases = {0, way.base}
        written = HEAD
    if keep_last == 9:
        kept_steps = [0, 2, 4, 6, 8]
        stops = [2, 5]
    else:
        kept_steps = sorted({*bases, 8})
        stops = [6]

    model = train(build(whole, keep_last=keep_last), way.body).state.model.state_dict()

    last = read_tensors(whole, 8)
    for name in HEAD | FROZEN:
        assert torch.equal(last[f"model/{name}"], model[name])
    assert written_names(whole, 8) == written
    assert bases_of(whole, 8) == [bases]
    assert Store(whole / "checkpoints").steps() == kept_steps
    assert [verify(checkpoint_dir(whole, step)) for step in kept_steps] == [[]] * len(kept_steps)
    for stop in stops:
        resumed = tmp_path / f"resumed-{stop}"
        train(build(resumed, keep_last=keep_last, stop_after=f"{stop} steps"), way.body)
        train(build(resumed, keep_last=keep_last), way.body)
        assert_same_bits(read_tensors(resumed, 8), last)
        assert written_names(resumed, 8) == written


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that has all of its checkpoints; nobody changes it."""
    run = tmp_path_factory.mktemp("trained")
    train(build(run, ema=None, keep_last=9))
    return run


def test_loading_follows_the_reference(trained: Path) -> None:
    model = sf.load(trained).load_model(Net())

    assert_frozen_values(model.state_dict(), read_tensors(trained, 0))


def test_an_export_follows_the_reference(trained: Path, tmp_path: Path) -> None:
    export = sf.load(trained).export(tmp_path / "out")

    exported = load_file(export.directory / "model.safetensors")
    last = read_tensors(trained, 8)
    assert_same_bits(exported, {name: last[f"model/{name}"] for name in HEAD | FROZEN})


def test_an_average_follows_the_references(trained: Path) -> None:
    averaged = sf.load(trained).load_model(Net(), checkpoint="average 3").state_dict()

    heads = [read_tensors(trained, step)["model/head.weight"].double() for step in (4, 6, 8)]
    assert torch.equal(averaged["head.weight"], (sum(heads) / 3).float())
    assert_frozen_values(averaged, read_tensors(trained, 0))


@pytest.mark.parametrize("source", ["", "checkpoints/step-00000008"], ids=["run", "checkpoint"])
def test_a_run_that_starts_from_one_follows_the_reference(source: str, trained: Path) -> None:
    started = train(build(None, init_from=str(trained / source), length="1 step", ema=None))

    assert_frozen_values(started.state.model.state_dict(), read_tensors(trained, 0))


def test_a_checkpoint_that_was_read_is_whole_wherever_it_is_saved(
    trained: Path, tmp_path: Path
) -> None:
    store = Store(tmp_path)
    store.save(read(checkpoint_dir(trained, 8)))

    assert verify(store.path(8)) == []
    assert read_bases(store.path(8)) == set()


def damage_base(how: str, base: Path) -> str:
    """Damage the checkpoint that others refer to; return the message that names it."""
    file = base / "model.safetensors"
    match how:
        case "flipped byte":
            flip_last(file)
            return "step-00000000/model.safetensors: hash differs"
        case "truncated":
            os.truncate(file, file.stat().st_size - 1)
            return "step-00000000/model.safetensors: [0-9]+ bytes long, but [0-9]+ bytes were saved"
        case "deleted file":
            file.unlink()
            return "step-00000000/model.safetensors: missing"
        case "flipped byte of the manifest":
            flip_last(base / MANIFEST)
            return "step-00000000, which has 3 of its frozen tensors, is damaged: manifest.json: "
    shutil.rmtree(base)
    return "step-00000000, which has 3 of its frozen tensors, is missing"


def flip_last(file: Path) -> None:
    data = file.read_bytes()
    file.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))


@pytest.mark.fast("flipped byte", "deleted")
@pytest.mark.parametrize(
    "how", ["flipped byte", "truncated", "deleted file", "flipped byte of the manifest", "deleted"]
)
def test_a_lost_or_changed_base_is_named_by_every_use_of_a_run(how: str, tmp_path: Path) -> None:
    run = tmp_path / "run"
    started = tmp_path / "started"
    val = sf.Split((torch.randn(8, 6), torch.randn(8, 1)))
    train(build(run, ema=None))
    train(build(started, init_from=str(run), ema=None, stop_after="4 steps"))
    evaluated = sf.load(build(run, ema=None, splits={"val": val}))
    last = str(checkpoint_dir(run, 8))
    uses: dict[str, Callable[[], Any]] = {
        "resume": lambda: train(build(run, ema=None, length="10 steps")),
        "load_model": lambda: sf.load(run).load_model(Net()),
        "average": lambda: sf.load(run).load_model(Net(), checkpoint="average 2"),
        "export": lambda: sf.load(run).export(tmp_path / "out"),
        "evaluate": lambda: evaluated.evaluate("val"),
        "init_from": lambda: train(build(tmp_path / "new", init_from=str(run), ema=None)),
        "init_from a checkpoint": lambda: train(build(None, init_from=last, ema=None)),
    }
    base = checkpoint_dir(run, 0)
    shutil.copytree(base, tmp_path / "copy")

    damage = damage_base(how, base)

    for use in uses.values():
        with pytest.raises(CheckpointError) as caught:
            use()
        assert caught.value.code in ("checkpoint-damaged", "no-intact-checkpoint")
        assert re.search(damage, str(caught.value))
    problems = [str(problem) for problem in sf.load(run).verify(windows=0).problems]
    assert len([problem for problem in problems if re.search(damage, problem)]) >= 2
    train(build(started, init_from=str(run), ema=None))  # has its own frozen tensors, and goes on
    assert bases_of(started, 8) == [{0}]
    # with the base in its place again every use works
    shutil.rmtree(base, ignore_errors=True)
    (tmp_path / "copy").rename(base)
    for use in uses.values():
        use()


def newest_intact(run: Path) -> tuple[int, list[int]]:
    """The step of the newest intact checkpoint, and the steps of the damaged ones after it."""
    checkpoint, damaged = damage_in(run)
    steps = [int(damage.path.name.removeprefix("step-")) for damage in damaged]
    return checkpoint.step, steps


def damage_in(run: Path) -> tuple[Checkpoint, list[DamageError]]:
    newest = Store(run / "checkpoints").newest_intact()
    assert newest is not None
    return newest


def test_another_checkpoint_in_the_place_of_a_base_is_named(tmp_path: Path) -> None:
    run = tmp_path / "run"
    train(build(run, ema=None))
    train(build(tmp_path / "another", ema=None, seed=1, length="2 steps"))

    shutil.rmtree(checkpoint_dir(run, 0))
    checkpoint_dir(tmp_path / "another", 0).rename(checkpoint_dir(run, 0))

    assert newest_intact(run) == (0, [8, 6])
    for damage in damage_in(run)[1]:
        _, _, of_base = str(damage).partition("step-00000000, ")
        assert numbers_in(of_base)[0] == 3  # frozen tensors


def test_a_checkpoint_copied_alone_says_what_it_lacks_and_where_to_put_it(tmp_path: Path) -> None:
    run = tmp_path / "run"
    there = tmp_path / "there"
    train(build(run, ema=None))

    shutil.copytree(checkpoint_dir(run, 8), there / "best")
    with refused("checkpoint-damaged", CheckpointError, path=there / "best") as caught:
        read(there / "best")
    assert str(there) in str(caught.value.remedies[0])

    shutil.copytree(checkpoint_dir(run, 0), there / "step-00000000")
    assert read(there / "best").tensors("model").keys() == HEAD | FROZEN


def test_a_link_to_a_checkpoint_finds_the_base_beside_the_checkpoint(
    trained: Path, tmp_path: Path
) -> None:
    (tmp_path / "link").symlink_to(checkpoint_dir(trained, 8))

    assert read(tmp_path / "link").tensors("model").keys() == HEAD | FROZEN


def test_an_older_checkpoint_is_used_only_if_it_does_not_need_the_damaged_base(
    tmp_path: Path,
) -> None:
    train(build(tmp_path, keep_last=9), rewrite_always_until_4)
    assert bases_of(tmp_path, 2, 4, 6, 8) == [{0}, {0}, {0, 4}, {0, 4}]

    os.remove(checkpoint_dir(tmp_path, 4) / "model.safetensors")

    assert newest_intact(tmp_path) == (2, [8, 6, 4])
    assert (
        str(damage_in(tmp_path)[1][0])
        == "checkpoint step-00000008 is damaged (step-00000004/model.safetensors: missing)"
    )


def rewrite_always_until_4(step: int, model: nn.Module) -> None:
    if step <= 4:
        rewrite_always(step, model)


@pytest.mark.parametrize("replaced", [False, True], ids=["lost", "replaced"])
def test_a_base_that_was_lost_during_the_run_is_written_again(
    replaced: bool, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    another = tmp_path / "another"
    if replaced:
        train(build(another, seed=1, length="1 step"))

    def lose(step: int, _: nn.Module) -> None:
        if step == 3:
            shutil.rmtree(checkpoint_dir(run, 0))
            if replaced:
                shutil.copytree(checkpoint_dir(another, 0), checkpoint_dir(run, 0))

    train(build(run, keep_last=9), lose)

    assert written_names(run, 4) == HEAD | FROZEN
    assert bases_of(run, 4, 6, 8) == [set(), {4}, {4}]
    assert verify(checkpoint_dir(run, 8)) == []


class Filling(Disk):
    """A disk that has no room while it is full."""

    full = False

    def append(self, handle: int, data: memoryview) -> None:
        if self.full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        super().append(handle, data)


@pytest.mark.parametrize("factor", [1.0, 2.0, 0.5])
def test_a_save_that_failed_is_no_base(factor: float, tmp_path: Path) -> None:
    """The save between two changes fails. A `factor` of 2 restores the weight of step 0, but not
    the bias.
    """
    disk = Filling()
    run = build(tmp_path, disk=disk, keep_last=9)
    changed = {"trunk.bias"} if factor == 2.0 else {"trunk.bias", "trunk.weight"}

    def fill(step: int, model: nn.Module) -> None:
        rewrite(step, model)
        if step == 5:
            model.get_parameter("trunk.weight").data.mul_(factor)
        run.parts.checkpointing.writer.wait()
        disk.full = step == 4  # a save follows the loop's body

    train(run, fill)

    assert Store(tmp_path / "checkpoints").steps() == [0, 2, 6, 8]
    assert written_names(tmp_path, 6) == HEAD | changed
    assert bases_of(tmp_path, 8) == [{0, 6}]
    weight = run.state.model.get_parameter("trunk.weight")
    assert torch.equal(read_tensors(tmp_path, 8)["model/trunk.weight"], weight)


def gradual(step: int, model: nn.Module) -> None:
    """Gradual unfreezing: the trunk's weight is trained in steps 2 and 8, and the table in steps 2
    and 3.
    """
    if step in (1, 2, 3, 7):
        model.get_parameter("trunk.weight").requires_grad_(step in (1, 7))
        model.get_parameter("table").requires_grad_(step < 3)


def build_gradual(run_dir: Path, **changes: Any) -> sf.Run:
    """A run that keeps the first checkpoint, the newest, the best one (of step 4), and what these
    refer to.
    """
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(8, 6, generator=generator)
    y = torch.randn(8, 1, generator=generator)
    settings = {
        "keep_last": 1,
        "ema": None,
        "splits": {"val": sf.Split((x, y))},
        "best": "min val/loss",
        "evaluate_every": "2 steps",
    }
    return build(run_dir, **(settings | changes))


def assert_complete(run: Path, expected: dict[int, dict[str, Tensor]]) -> None:
    """Every checkpoint has all of its tensors, with the bits of the undisturbed run, and the best
    one is there.
    """
    store = Store(run / "checkpoints")
    for step in store.steps():
        assert verify(checkpoint_dir(run, step)) == []
        assert_same_bits(read_tensors(run, step), expected[step])
    newest = store.newest_intact()
    if newest is not None:
        checkpoint, damaged = newest
        assert damaged == []
        assert checkpoint.saved.best_step in {None, *store.steps()}


OPERATIONS = {"min val/loss": 122, None: 138}  # on files, in all saves of the run, by `best`
EVERY = range(1, max(OPERATIONS.values()) + 1)
FEW = [53, 77, 101]  # a base is referred to, the next is written, the first is pruned
posix = pytest.mark.skipif(sys.platform == "win32", reason="needs fork and SIGKILL")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[str, Tensor]]:
    """The tensors of every checkpoint of a run that no fault has met."""
    run = tmp_path_factory.mktemp("undisturbed")
    train(build_gradual(run, keep_last=9), gradual)
    assert bases_of(run, 2, 4, 6, 8) == [{0}, {0, 2}, {0}, {0, 6}]
    return {step: read_tensors(run, step) for step in (0, 2, 4, 6, 8)}


@pytest.mark.parametrize(
    ("best", "kept_steps"),
    [("min val/loss", [0, 2, 4, 6, 8]), (None, [0, 6, 8])],
    ids=["best", "none"],
)
def test_gradual_unfreezing_keeps_what_its_checkpoints_refer_to(
    best: str | None, kept_steps: list[int], tmp_path: Path
) -> None:
    disk = Faulty(Disk(), failing(0), at=0, for_good=False)

    train(build_gradual(tmp_path, best=best, disk=disk), gradual)

    assert Store(tmp_path / "checkpoints").steps() == kept_steps
    assert disk.operations == OPERATIONS[best]  # or the tests below would miss some


def killed_in_gradual(run: Path, best: str | None, at: int) -> bool:
    """Whether the run was killed before this operation on files."""
    child = os.fork()
    if child == 0:
        try:
            disk = Faulty(Disk(), killed_for_real, at=at, for_good=False)
            train(build_gradual(run, best=best, disk=disk), gradual)
        finally:
            os._exit(0)
    _, status = os.waitpid(child, 0)
    return status == signal.SIGKILL


def finish_gradual(run: Path, best: str | None, expected: dict[int, dict[str, Tensor]]) -> None:
    """Resume the run: it ends with the bits of the undisturbed one."""
    train(build_gradual(run, best=best), gradual)
    assert_complete(run, expected)
    assert Store(run / "checkpoints").steps()[-1] == LAST


@posix
@pytest.mark.filterwarnings(
    "ignore:This process .* is multi-threaded, use of fork:DeprecationWarning"
)
@pytest.mark.fast("few-none")
@pytest.mark.parametrize("best", OPERATIONS, ids=["best", "none"])
@pytest.mark.parametrize("operations", [FEW, EVERY], ids=["few", "every"])
def test_gradual_unfreezing_killed_at_any_operation_of_its_saves_keeps_what_it_refers_to(
    operations: Sequence[int],
    best: str | None,
    undisturbed: dict[int, dict[str, Tensor]],
    tmp_path: Path,
) -> None:
    for at in operations:
        run = tmp_path / str(at)
        assert killed_in_gradual(run, best, at) == (at <= OPERATIONS[best])
        assert_complete(run, undisturbed)
        finish_gradual(run, best, undisturbed)


@pytest.mark.fast("few-5")
@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC])
@pytest.mark.parametrize("operations", [FEW, EVERY], ids=["few", "every"])
def test_gradual_unfreezing_goes_on_after_any_operation_of_its_saves_failed(
    operations: Sequence[int],
    number: int,
    undisturbed: dict[int, dict[str, Tensor]],
    tmp_path: Path,
) -> None:
    """A save between two changes of frozen values fails: the checkpoints before stay, and the next
    save has all that changed.
    """
    for at in operations:
        run = tmp_path / str(at)
        only = NEEDS_ROOM if number == errno.ENOSPC else None
        disk = Faulty(Disk(), failing(number), at=at, only=only, for_good=False)
        faulty = build_gradual(run, best=None, disk=disk)
        with suppress(CheckpointError), faulty:  # of the last save
            for step in faulty:
                gradual(step.index + 1, faulty.state.model)
                faulty.parts.checkpointing.writer.wait()
                assert_complete(run, undisturbed)
        assert only or disk.happened
        assert_complete(run, undisturbed)
        finish_gradual(run, None, undisturbed)


def test_a_checkpoint_written_twice_is_not_its_own_base(tmp_path: Path) -> None:
    store = Store(tmp_path)
    frozen = FrozenTensors(store, World(torch.device("cpu")))
    weight = torch.randn(4)
    for step in (0, 3, 3, 5):
        if step == 3:
            weight = torch.ones(4)
        bases = frozen.bases(step, {"model": {"weight": (weight, None)}})
        model = {"head": torch.randn(2)}
        if bases == []:
            model["weight"] = weight
        store.save(Checkpoint(step, {"model": model}, bases=bases))
        frozen.saved(step)

    assert "weight" in load_file(store.path(3) / "model.safetensors")
    assert read_bases(store.path(5)) == {3}
    assert torch.equal(store.at(5).tensors("model")["weight"], weight)


def test_nothing_is_pruned_that_a_manifest_may_name_which_cannot_be_read_now(
    tmp_path: Path,
) -> None:
    class Failing(Disk):
        def read(self, path: Path, *, start: int, length: int) -> bytes:
            if path == tmp_path / "step-00000003" / MANIFEST:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            return super().read(path, start=start, length=length)

    def steps_after_save(disk: Disk) -> list[int]:
        store = Store(tmp_path, keep_last=3, disk=disk)
        store.intact |= {3, 4}
        store.save(Checkpoint(5, weight))
        return store.steps()

    weight = {"model": {"weight": torch.ones(2)}}
    for step in (1, 2, 3, 4):
        Store(tmp_path, keep_last=9).save(Checkpoint(step, weight))

    assert steps_after_save(Failing()) == [1, 2, 3, 4, 5]
    assert steps_after_save(Disk()) == [3, 4, 5]


def test_a_checkpoint_that_is_kept_as_a_base_keeps_its_own_bases(tmp_path: Path) -> None:
    store = Store(tmp_path, keep_last=1)
    bases: list[Base] = []
    for step, name in enumerate("abc", start=1):
        store.save(Checkpoint(step, {"model": {name: torch.ones(2)}}, bases=bases))
        bases = [Base(step, store.digests[step], {"model": [name]})]

    assert store.steps() == [1, 2, 3]
    assert [verify(store.path(step)) for step in (1, 2, 3)] == [[], [], []]

    store.save(Checkpoint(4, {"model": {"a": torch.ones(2)}}))
    assert store.steps() == [4]


def test_tensors_of_a_save_that_failed_are_not_taken_as_stored(tmp_path: Path) -> None:
    store = Store(tmp_path)
    frozen = FrozenTensors(store, World(torch.device("cpu")))
    weight = torch.randn(4)
    changed = weight + 1.0
    store.save(Checkpoint(2, {"model": {"weight": weight}}))

    def bases(step: int, weight: Tensor) -> list[Base]:
        return frozen.bases(step, {"model": {"weight": (weight, None)}})

    assert bases(2, weight) == []
    frozen.saved(2)
    assert bases(2, changed) == []
    frozen.saved(None)

    assert [base.step for base in bases(3, weight)] == [2]
    assert bases(3, changed) == []


@pytest.mark.parametrize("base", [-1, 3, 4, "0"])
def test_a_manifest_that_refers_to_no_older_checkpoint_is_damaged(base: Any) -> None:
    bases = [Base(base, "ab", {"model": ["weight"]})]
    manifest = Manifest(3, {"state.json": (1, "ab")}, None, bases)
    entry = {"sha256": "ab", "step": base, "tensors": {"model": ["weight"]}}

    with pytest.raises(ValueError, match=re.escape(repr(entry))):
        from_bytes(to_bytes(manifest))


def test_a_base_that_lacks_a_tensor_is_damage(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.save(Checkpoint(1, {"model": {"weight": torch.ones(2)}}))
    base = Base(1, store.digests[1], {"model": ["trunk"]})
    store.save(Checkpoint(3, {"model": {"weight": torch.ones(2)}}, bases=[base]))
    damage = "step-00000001/model: lacks trunk"
    with refused("checkpoint-damaged", CheckpointError, path=store.path(3), damage=damage):
        read(store.path(3))


@pytest.mark.parametrize("bases", [5, None, {"model": 1}, "model"])
def test_a_manifest_whose_bases_are_no_list_is_damaged(bases: Any, tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.save(Checkpoint(3, {"model": {"weight": torch.ones(2)}}))
    file = store.path(3) / MANIFEST
    body = json.loads(file.read_text()) | {"bases": bases}
    del body["sha256"]
    digest = sha256(manifest_text(body).encode()).hexdigest()
    file.write_text(manifest_text(body | {"sha256": digest}))

    (problem,) = verify(store.path(3))

    assert problem.startswith(f"manifest.json: {bases!r} ")


def manifest_text(body: dict[str, Any]) -> str:
    return json.dumps(body, sort_keys=True, indent=1) + "\n"


def fingerprint(tensor: Tensor) -> list[Any]:
    frozen = FrozenTensors(Store("unused"), World(torch.device("cpu")))
    return frozen._fingerprints({"model": {"weight": (tensor, None)}})["model", "weight"]


@pytest.mark.parametrize(
    "dtype",
    [torch.float32, torch.bfloat16, torch.float64, torch.uint8, torch.bool, torch.complex64],
)
@pytest.mark.parametrize("shape", [(), (1,), (3,), (5, 7), (2, 3, 4)])
def test_a_fingerprint_changes_with_any_bit_and_with_order_and_shape(
    shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(0)
    tensor = (torch.randn(shape, generator=generator) * 3).to(dtype)
    before = fingerprint(tensor)
    assert fingerprint(tensor.clone()) == before

    if dtype != torch.bool:
        flipped = [tuple(fingerprint(other)) for other in with_each_bit_flipped(tensor)]
        assert len(flipped) == 8 * tensor.nbytes
        assert len({tuple(before), *flipped}) == 1 + len(flipped)
    assert fingerprint(tensor.reshape(*shape, 1)) != before
    if tensor.numel() > 4 and dtype != torch.bool:
        assert fingerprint(tensor.flatten().flip(0).reshape(shape)) != before
    if dtype.is_floating_point:
        assert fingerprint(-tensor) != before


def with_each_bit_flipped(tensor: Tensor) -> Iterator[Tensor]:
    data = tensor.contiguous().reshape(-1).view(torch.uint8)
    for bit in range(8 * len(data)):
        flipped = data.clone()
        flipped[bit // 8] ^= 1 << bit % 8
        yield flipped.view(tensor.dtype).reshape(tensor.shape)


def test_a_fingerprint_depends_on_values_and_not_on_layout_or_memory() -> None:
    images = torch.randn(6, 4, 3, 3)
    assert fingerprint(images.to(memory_format=torch.channels_last)) == fingerprint(images)

    halves = torch.arange(9, dtype=torch.bfloat16)
    assert fingerprint(halves[1:]) == fingerprint(halves[1:].clone())  # of another alignment

    assert fingerprint(torch.zeros(0, 3)) != fingerprint(torch.zeros(3, 0))


def test_a_fingerprint_draws_no_random_number() -> None:
    tensor = torch.randn(6)
    before = torch.get_rng_state()

    fingerprint(tensor)

    assert torch.equal(torch.get_rng_state(), before)


def test_changes_that_cancel_in_plain_sums_change_a_fingerprint() -> None:
    tensor = torch.randn(3 << 18)
    before = fingerprint(tensor)
    generator = torch.Generator().manual_seed(1)
    for _ in range(20):
        i, j = torch.randint(len(tensor), (2,), generator=generator).tolist()

        swapped = tensor.clone()
        swapped[[i, j]] = swapped[[j, i]]
        assert fingerprint(swapped) != before

        negated = tensor.clone()
        negated[[i, j]] *= -1.0
        assert fingerprint(negated) != before


def test_a_sharded_tensor_is_left_out_only_if_no_rank_has_changed_its_rows(tmp_path: Path) -> None:
    class TwoRanks(World):
        """Two ranks, of which the other one has the same rows of `same` only."""

        def gathered(self, value: Any) -> list[Any]:
            return [value, [["model", "same"]]]

    store = Store(tmp_path)
    frozen = FrozenTensors(store, TwoRanks(torch.device("cpu")))
    rows: Any = object()
    tensors = {name: torch.randn(3) for name in ("same", "changed", "replicated")}
    live = {
        "model": {
            "same": (tensors["same"], rows),
            "changed": (tensors["changed"], rows),
            "replicated": (tensors["replicated"], None),
        }
    }
    assert frozen.bases(0, live) == []
    store.save(Checkpoint(0, {"model": tensors}))
    frozen.saved(0)

    (base,) = frozen.bases(2, live)

    assert base.tensors == {"model": ["replicated", "same"]}
