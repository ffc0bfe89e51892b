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
from collections.abc import Callable, Sequence
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import surefoot as sf
from medium import NEEDS_ROOM, Faulty, failing, killed_for_real
from refused import refused
from stated import numbers_in
from surefoot.checkpoint import Checkpoint, Store
from surefoot.checkpoint.filesystem import Disk
from surefoot.checkpoint.frozen import FrozenTensors
from surefoot.checkpoint.manifest import MANIFEST, Base, Manifest, from_bytes, to_bytes
from surefoot.checkpoint.reader import read, read_bases, verify
from surefoot.distributed.world import World
from surefoot.errors import CheckpointError

LAST = 8
Body = Callable[[int, nn.Module], None]


class Net(nn.Module):
    """A frozen trunk, a frozen table that is tied to a second name, a buffer and a trained head."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.head = nn.Linear(6, 40), nn.Linear(40, 1)
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
    x, y = torch.randn(32, 6, generator=generator), torch.randn(32, 1, generator=generator)
    settings: dict[str, Any] = {
        "length": f"{LAST} steps",
        "save_every": "2 steps",
        "keep_last": 2,
        "ema": 0.9,
    }
    settings |= {
        "model": Net,
        "console": False,
        "report": False,
        "device": "cpu",
        "batch_size": 4,
        "tensorboard": False,
    }
    return sf.Run(
        loss=loss,
        train_data=(x, y),
        optimizer=sf.optim.adamw(lr=0.05),
        run_dir=run_dir,
        **settings | changes,
    )


def train(run: sf.Run, body: Body = lambda _, __: None) -> sf.Run:
    with run:
        for step in run:
            body(step.index + 1, run.state.model)
    return run


def path(run: Path, step: int) -> Path:
    return run / "checkpoints" / f"step-{step:08d}"


def own(run: Path, step: int, file: str = "model") -> set[str]:
    """The tensors that a checkpoint itself has."""
    return set(load_file(path(run, step) / f"{file}.safetensors"))


def tensors(run: Path, step: int) -> dict[str, Tensor]:
    checkpoint = Store(run / "checkpoints").at(step)
    return {
        f"{file}/{name}": each
        for file in checkpoint.files
        for name, each in checkpoint.tensors(file).items()
    }


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    skip = "state/meter"  # has times
    return {k for k in a if not k.startswith(skip)} == {
        k for k in b if not k.startswith(skip)
    } and all(torch.equal(a[name], b[name]) for name in a if not name.startswith(skip))


HEAD = {"head.weight", "head.bias", "passes"}
FROZEN = {"trunk.weight", "trunk.bias", "table"}


def test_a_checkpoint_has_what_changes_and_refers_to_the_first_one_for_the_rest(
    tmp_path: Path,
) -> None:
    train(build(tmp_path))
    assert own(tmp_path, 0) == own(tmp_path, 0, "ema") == HEAD | FROZEN
    for step in (6, 8):
        assert own(tmp_path, step) == own(tmp_path, step, "ema") == HEAD
        assert read_bases(path(tmp_path, step)) == {0}
        assert (
            json.loads((path(tmp_path, step) / "manifest.json").read_text())["format_version"] == 7
        )
        assert verify(path(tmp_path, step)) == []
        read_tensors = tensors(tmp_path, step)
        first = tensors(tmp_path, 0)
        assert all(
            torch.equal(read_tensors[f"{file}/{n}"], first[f"model/{n}"])
            for n in FROZEN
            for file in ("model", "ema")
        )
    assert json.loads((path(tmp_path, 0) / "manifest.json").read_text())["format_version"] == 5
    assert sf.load(build(tmp_path)).verify().exit_status == 0


def test_a_run_without_frozen_parameters_refers_to_nothing(tmp_path: Path) -> None:
    train(build(tmp_path, model=lambda: nn.Linear(6, 1), length="2 steps"))
    assert read_bases(path(tmp_path, 2)) == set()
    assert json.loads((path(tmp_path, 2) / "manifest.json").read_text())["format_version"] == 5


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


WAYS: list[tuple[Body, set[str], int]] = [
    (unfreeze, {"trunk.weight", "trunk.bias"}, -1),
    (freeze, {"trunk.weight", "trunk.bias"}, 4),
    (rewrite, {"trunk.weight", "trunk.bias"}, 4),
    (rewrite_always, {"trunk.weight"}, -1),
]


@pytest.mark.fast("unfreeze-9", "freeze-1", "rewrite-9", "rewrite_always-1")
@pytest.mark.parametrize("keep_last", [1, 9])
@pytest.mark.parametrize(("body", "changed", "base"), WAYS, ids=[way[0].__name__ for way in WAYS])
def test_what_changes_later_is_written_and_a_resume_at_any_save_ends_in_the_same_bits(
    body: Body, changed: set[str], base: int, keep_last: int, tmp_path: Path
) -> None:
    """`base`: the checkpoint to which later ones refer for what changed before it."""
    whole = train(build(tmp_path / "whole", keep_last=keep_last), body).state.model.state_dict()
    assert own(tmp_path / "whole", 8) == HEAD | (changed if base < 0 else set())
    expected = {0} if base < 0 else {0, base}
    assert read_bases(path(tmp_path / "whole", 8)) == expected
    assert Store(tmp_path / "whole" / "checkpoints").steps() == (
        [0, 2, 4, 6, 8] if keep_last == 9 else sorted({*expected, 8})
    )
    last = tensors(tmp_path / "whole", 8)
    assert all(torch.equal(last[f"model/{name}"], whole[name]) for name in HEAD | FROZEN)
    for killed in (2, 5) if keep_last == 9 else (6,):
        parts = tmp_path / f"parts-{killed}"
        train(build(parts, keep_last=keep_last, stop_after=f"{killed} steps"), body)
        train(build(parts, keep_last=keep_last), body)
        assert same(tensors(parts, 8), last)
        assert own(parts, 8) == own(tmp_path / "whole", 8)
    assert not [
        problem
        for step in Store(tmp_path / "whole" / "checkpoints").steps()
        for problem in verify(path(tmp_path / "whole", step))
    ]


def test_every_use_of_a_run_follows_the_reference(tmp_path: Path) -> None:
    run = tmp_path / "run"
    train(build(run, ema=None, keep_last=9))
    frozen, last = tensors(run, 0), tensors(run, 8)
    model = sf.load(run).load_model(Net())
    assert all(torch.equal(model.get_parameter(name), frozen[f"model/{name}"]) for name in FROZEN)
    exported = load_file(sf.load(run).export(tmp_path / "out").directory / "model.safetensors")
    assert exported.keys() == HEAD | FROZEN
    assert all(torch.equal(exported[name], last[f"model/{name}"]) for name in exported)
    averaged = sf.load(run).load_model(Net(), checkpoint="average 3").state_dict()
    head = sum(tensors(run, step)["model/head.weight"].double() for step in (4, 6, 8)) / 3
    assert torch.equal(averaged["head.weight"], torch.as_tensor(head).float())
    assert all(torch.equal(averaged[name], frozen[f"model/{name}"]) for name in FROZEN)
    for source in (run, path(run, 8)):
        started = train(
            build(None, init_from=str(source), length="1 step", ema=None)
        ).state.model.state_dict()
        assert all(torch.equal(started[name], frozen[f"model/{name}"]) for name in FROZEN)
    Store(tmp_path / "other").save(
        read(path(run, 8))
    )  # one that was read is whole wherever it is saved
    assert verify(tmp_path / "other" / "step-00000008") == []
    assert read_bases(tmp_path / "other" / "step-00000008") == set()


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
    train(build(run, ema=None))
    train(build(started, init_from=str(run), ema=None, stop_after="4 steps"))
    again = sf.load(
        build(run, ema=None, splits={"val": sf.Split((torch.randn(8, 6), torch.randn(8, 1)))})
    )
    uses: dict[str, Callable[[], Any]] = {
        "resume": lambda: train(build(run, ema=None, length="10 steps")),
        "load_model": lambda: sf.load(run).load_model(Net()),
        "average": lambda: sf.load(run).load_model(Net(), checkpoint="average 2"),
        "export": lambda: sf.load(run).export(tmp_path / "out"),
        "evaluate": lambda: again.evaluate("val"),
        "init_from": lambda: train(build(tmp_path / "new", init_from=str(run), ema=None)),
        "init_from a checkpoint": lambda: train(build(None, init_from=str(path(run, 8)), ema=None)),
    }
    shutil.copytree(path(run, 0), tmp_path / "copy")
    why = damage_base(how, path(run, 0))
    for use in uses.values():
        with pytest.raises(CheckpointError) as error:
            use()
        assert error.value.code in ("checkpoint-damaged", "no-intact-checkpoint")
        assert re.search(why, str(error.value))
    problems = [str(problem) for problem in sf.load(run).verify(windows=0).problems]
    assert len([problem for problem in problems if re.search(why, problem)]) >= 2
    train(build(started, init_from=str(run), ema=None))  # has its own frozen tensors, and goes on
    assert read_bases(path(started, 8)) == {0}
    shutil.rmtree(path(run, 0), ignore_errors=True)
    (tmp_path / "copy").rename(path(run, 0))
    for use in uses.values():
        use()


def test_another_checkpoint_in_the_place_of_a_base_is_named(tmp_path: Path) -> None:
    run = tmp_path / "run"
    train(build(run, ema=None))
    train(build(tmp_path / "another", ema=None, seed=1, length="2 steps"))
    shutil.rmtree(path(run, 0))
    path(tmp_path / "another", 0).rename(path(run, 0))
    checkpoint, damaged = Store(run / "checkpoints").newest_intact() or pytest.fail("nothing")
    assert (checkpoint.step, [damage.path.name[-1] for damage in damaged]) == (0, ["8", "6"])
    for damage in damaged:
        _, _, of_base = str(damage).partition("step-00000000, ")
        assert numbers_in(of_base)[0] == 3  # frozen tensors


def test_a_checkpoint_copied_alone_says_what_it_lacks_and_where_to_put_it(tmp_path: Path) -> None:
    train(build(tmp_path / "run", ema=None))
    there = tmp_path / "there"
    shutil.copytree(path(tmp_path / "run", 8), there / "best")
    with refused("checkpoint-damaged", CheckpointError, path=there / "best") as error:
        read(there / "best")
    assert str(there) in str(error.value.remedies[0])
    shutil.copytree(path(tmp_path / "run", 0), there / "step-00000000")
    assert read(there / "best").tensors("model").keys() == HEAD | FROZEN
    (tmp_path / "link").symlink_to(path(tmp_path / "run", 8))
    assert read(tmp_path / "link").tensors("model").keys() == HEAD | FROZEN


def test_an_older_checkpoint_is_used_only_if_it_does_not_need_the_damaged_base(
    tmp_path: Path,
) -> None:
    train(build(tmp_path, keep_last=9), rewrite_always_until_4)
    assert [read_bases(path(tmp_path, step)) for step in (2, 4, 6, 8)] == [{0}, {0}, {0, 4}, {0, 4}]
    os.remove(path(tmp_path, 4) / "model.safetensors")
    checkpoint, damaged = Store(tmp_path / "checkpoints").newest_intact() or pytest.fail("nothing")
    assert checkpoint.step == 2
    assert [damage.path.name[-1] for damage in damaged] == ["8", "6", "4"]
    assert (
        str(damaged[0])
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
    if replaced:
        train(build(tmp_path / "another", seed=1, length="1 step"))

    def lose(step: int, _: nn.Module) -> None:
        if step == 3:
            shutil.rmtree(path(run, 0))
            if replaced:
                shutil.copytree(path(tmp_path / "another", 0), path(run, 0))

    train(build(run, keep_last=9), lose)
    assert own(run, 4) == HEAD | FROZEN
    assert [read_bases(path(run, step)) for step in (4, 6, 8)] == [set(), {4}, {4}]
    assert verify(path(run, 8)) == []


@pytest.mark.parametrize("factor", [1.0, 2.0, 0.5])
def test_a_save_that_failed_is_no_base(factor: float, tmp_path: Path) -> None:
    """The save between two changes fails. A `factor` of 2 restores the weight of step 0, but not
    the bias.
    """

    class Full(Disk):
        full = False

        def append(self, handle: int, data: memoryview) -> None:
            if self.full:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            super().append(handle, data)

    disk = Full()

    def fill(step: int, model: nn.Module) -> None:
        rewrite(step, model)
        if step == 5:
            model.get_parameter("trunk.weight").data.mul_(factor)
        run.parts.checkpointing.writer.wait()
        disk.full = step == 4  # a save follows the loop's body

    run = build(tmp_path, disk=disk, keep_last=9)
    train(run, fill)
    assert Store(tmp_path / "checkpoints").steps() == [0, 2, 6, 8]
    assert own(tmp_path, 6) == HEAD | {"trunk.bias"} | (
        {"trunk.weight"} if factor != 2.0 else set()
    )
    assert read_bases(path(tmp_path, 8)) == {0, 6}
    weight = run.state.model.get_parameter("trunk.weight")
    assert torch.equal(tensors(tmp_path, 8)["model/trunk.weight"], weight)


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
    val = sf.Split((torch.randn(8, 6, generator=generator), torch.randn(8, 1, generator=generator)))
    best = {"splits": {"val": val}, "best": "min val/loss", "evaluate_every": "2 steps"}
    return build(run_dir, **{"keep_last": 1, "ema": None} | best | changes)


def assert_complete(run: Path, expected: dict[int, dict[str, Tensor]]) -> None:
    """Every checkpoint has all of its tensors, with the bits of the undisturbed run, and the best
    one is there.
    """
    store = Store(run / "checkpoints")
    for step in store.steps():
        assert verify(path(run, step)) == []
        assert same(tensors(run, step), expected[step])
    if (intact := store.newest_intact()) is not None:
        assert intact[1] == []
        assert intact[0].saved.best_step in {None, *store.steps()}


OPERATIONS = {"min val/loss": 122, None: 138}  # on files, in all saves of the run, by `best`
EVERY, FEW = (
    range(1, max(OPERATIONS.values()) + 1),
    [53, 77, 101],
)  # a base is referred to, the next is written, the first is pruned
posix = pytest.mark.skipif(sys.platform == "win32", reason="needs fork and SIGKILL")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[str, Tensor]]:
    """The tensors of every checkpoint of a run that no fault has met."""
    run = tmp_path_factory.mktemp("undisturbed")
    train(build_gradual(run / "all", keep_last=9), gradual)
    assert [read_bases(path(run / "all", step)) for step in (2, 4, 6, 8)] == [
        {0},
        {0, 2},
        {0},
        {0, 6},
    ]
    for best, steps in (("min val/loss", [0, 2, 4, 6, 8]), (None, [0, 6, 8])):
        disk = Faulty(Disk(), failing(0), at=0, for_good=False)
        train(build_gradual(run / f"{best}", best=best, disk=disk), gradual)
        assert (Store(run / f"{best}" / "checkpoints").steps(), disk.operations) == (
            steps,
            OPERATIONS[best],
        )
    return {step: tensors(run / "all", step) for step in (0, 2, 4, 6, 8)}


def killed_in_gradual(run: Path, best: str | None, at: int) -> bool:
    """Whether the run was killed before this operation on files."""
    if (child := os.fork()) == 0:
        try:
            train(
                build_gradual(
                    run, best=best, disk=Faulty(Disk(), killed_for_real, at=at, for_good=False)
                ),
                gradual,
            )
        finally:
            os._exit(0)
    return os.waitpid(child, 0)[1] == signal.SIGKILL


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
        train(build_gradual(run, best=best), gradual)
        assert_complete(run, undisturbed)
        assert Store(run / "checkpoints").steps()[-1] == LAST


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
        built = build_gradual(run, best=None, disk=disk)
        with suppress(CheckpointError), built:  # of the last save
            for step in built:
                gradual(step.index + 1, built.state.model)
                built.parts.checkpointing.writer.wait()
                assert_complete(run, undisturbed)
        assert only or disk.happened
        assert_complete(run, undisturbed)
        train(build_gradual(run, best=None), gradual)
        assert_complete(run, undisturbed)
        assert Store(run / "checkpoints").steps()[-1] == LAST


def test_a_checkpoint_written_twice_is_not_its_own_base(tmp_path: Path) -> None:
    store = Store(tmp_path)
    frozen = FrozenTensors(store, World(torch.device("cpu")))
    weight, head = torch.randn(4), torch.randn(2)
    for step in (0, 3, 3, 5):
        bases = frozen.bases(step, {"model": {"weight": (weight, None)}})
        left_out = {name for base in bases for name in base.tensors["model"]}
        model = {
            name: each
            for name, each in {"weight": weight, "head": head}.items()
            if name not in left_out
        }
        store.save(Checkpoint(step, {"model": model}, bases=bases))
        frozen.saved(step)
        if step == 0:
            weight = weight + 1.0
    assert "weight" in load_file(tmp_path / "step-00000003" / "model.safetensors")
    assert read_bases(tmp_path / "step-00000005") == {3}
    assert torch.equal(store.at(5).tensors("model")["weight"], weight)


FINGERPRINTS = FrozenTensors(Store("unused"), World(torch.device("cpu")))


def test_nothing_is_pruned_that_a_manifest_may_name_which_cannot_be_read_now(
    tmp_path: Path,
) -> None:
    class Failing(Disk):
        def read(self, path: Path, *, start: int, length: int) -> bytes:
            if path == tmp_path / "step-00000003" / "manifest.json":
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            return super().read(path, start=start, length=length)

    weight = {"model": {"weight": torch.ones(2)}}
    for step in (1, 2, 3, 4):
        Store(tmp_path, keep_last=9).save(Checkpoint(step, weight))
    for disk, left in ((Failing(), [1, 2, 3, 4, 5]), (Disk(), [3, 4, 5])):
        store = Store(tmp_path, keep_last=3, disk=disk)
        store.intact |= {3, 4}
        store.save(Checkpoint(5, weight))
        assert store.steps() == left


def test_a_checkpoint_that_is_kept_as_a_base_keeps_its_own_bases(tmp_path: Path) -> None:
    store = Store(tmp_path, keep_last=1)
    names = ["a", "b", "c"]
    bases = list[Base]()
    for step, name in enumerate(
        names, start=1
    ):  # each has one tensor, and the older ones have the others
        store.save(
            Checkpoint(step, {"model": {name: torch.full((2,), float(step))}}, bases=bases[-1:])
        )
        bases.append(Base(step, store.digests[step], {"model": [name]}))
    assert store.steps() == [1, 2, 3]
    assert not [problem for step in store.steps() for problem in verify(store.path(step))]
    store.save(Checkpoint(4, {"model": {"a": torch.ones(2)}}))
    assert store.steps() == [4]


def test_tensors_of_a_save_that_failed_are_not_taken_as_stored(tmp_path: Path) -> None:
    store = Store(tmp_path)
    frozen = FrozenTensors(store, World(torch.device("cpu")))
    weight = torch.randn(4)
    store.save(Checkpoint(2, {"model": {"weight": weight}}))
    for changed, saved in ((weight, 2), (weight + 1.0, None)):
        assert frozen.bases(2, {"model": {"weight": (changed, None)}}) == []
        frozen.saved(saved)
    assert frozen.bases(3, {"model": {"weight": (weight, None)}})[0].step == 2
    assert frozen.bases(3, {"model": {"weight": (weight + 1.0, None)}}) == []


@pytest.mark.parametrize("base", [-1, 3, 4, "0"])
def test_a_manifest_that_refers_to_no_older_checkpoint_is_damaged(base: Any) -> None:
    manifest = Manifest(
        3, {"state.json": (1, "ab")}, None, [Base(base, "ab", {"model": ["weight"]})]
    )
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
    directory = Store(tmp_path).path(3)
    Store(tmp_path).save(Checkpoint(3, {"model": {"weight": torch.ones(2)}}))
    body = json.loads((directory / MANIFEST).read_text()) | {"bases": bases}
    del body["sha256"]
    text = [
        json.dumps(each, sort_keys=True, indent=1) + "\n" for each in (body, body | {"sha256": ""})
    ]
    digest = sha256(text[0].encode()).hexdigest()
    (directory / MANIFEST).write_text(text[1].replace('"sha256": ""', f'"sha256": "{digest}"'))
    (problem,) = verify(directory)
    assert problem.startswith(f"manifest.json: {bases!r} ")


def fingerprint(tensor: Tensor) -> list[Any]:
    return FINGERPRINTS._fingerprints({"model": {"weight": (tensor, None)}})["model", "weight"]


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
    data = tensor.contiguous().reshape(-1).view(torch.uint8)
    before = fingerprint(tensor)
    assert fingerprint(tensor.clone()) == before
    fingerprints = {tuple(before)}
    flips = range(0 if dtype == torch.bool else 8 * len(data))
    for bit in flips:
        data[bit // 8] ^= 1 << bit % 8
        fingerprints.add(tuple(fingerprint(data.view(dtype).reshape(shape))))
        data[bit // 8] ^= 1 << bit % 8
    assert len(fingerprints) == len(flips) + 1
    assert fingerprint(tensor.reshape(*shape, 1)) != before
    if tensor.numel() > 4 and dtype != torch.bool:
        assert fingerprint(tensor.flatten().flip(0).reshape(shape)) != before
    if dtype.is_floating_point:
        assert fingerprint(-tensor) != before


def test_a_fingerprint_depends_on_values_and_not_on_layout_or_memory() -> None:
    tensor = torch.randn(6, 4, 3, 3)
    assert fingerprint(tensor.to(memory_format=torch.channels_last)) == fingerprint(tensor)
    halves = torch.arange(9, dtype=torch.bfloat16)
    assert fingerprint(halves[1:]) == fingerprint(halves[1:].clone())  # of another alignment
    assert fingerprint(torch.zeros(0, 3)) != fingerprint(torch.zeros(3, 0))
    before = torch.get_rng_state()
    fingerprint(tensor)
    assert torch.equal(torch.get_rng_state(), before)


def test_changes_that_cancel_in_plain_sums_change_a_fingerprint() -> None:
    tensor = torch.randn(3 << 18)
    before = fingerprint(tensor)
    generator = torch.Generator().manual_seed(1)
    for _ in range(20):
        i, j = torch.randint(len(tensor), (2,), generator=generator).tolist()
        other = tensor.clone()
        other[[i, j]] = other[[j, i]]
        assert fingerprint(other) != before
        other = tensor.clone()
        other[[i, j]] *= -1.0
        assert fingerprint(other) != before


def test_a_sharded_tensor_is_left_out_only_if_no_rank_has_changed_its_rows(tmp_path: Path) -> None:
    class Ranks(World):
        """Two ranks, of which the other one has the same rows of `same` only."""

        def gathered(self, value: Any) -> list[Any]:
            return [value, [["model", "same"]]]

    store = Store(tmp_path)
    world = Ranks(torch.device("cpu"))
    frozen = FrozenTensors(store, world)
    rows: Any = object()
    tensors = {name: torch.randn(3) for name in ("same", "changed", "replicated")}
    live = {
        "model": {
            name: (each, None if name == "replicated" else rows) for name, each in tensors.items()
        }
    }
    assert frozen.bases(0, live) == []
    store.save(Checkpoint(0, {"model": tensors}))
    frozen.saved(0)
    (base,) = frozen.bases(2, live)
    assert base.tensors == {"model": ["replicated", "same"]}
