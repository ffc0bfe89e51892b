"""File systems that become read-only, lock nothing or lose sight of files while a run trains; kills
in a save of 300 MB.
"""

from __future__ import annotations

import errno
import multiprocessing
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import small_runs
import surefoot as sf
from stated import lines_naming
from surefoot.checkpoint import Store
from surefoot.checkpoint.filesystem import Disk
from waiting import wait_until

MEGABYTES = 300  # of a checkpoint: weights, and two moments of AdamW


def newest_files(run_dir: Path) -> tuple[str, dict[str, bytes]]:
    """The name of the newest checkpoint, and its files of tensors."""
    directory = max((run_dir / "checkpoints").glob("step-*"))
    files = {file.name: file.read_bytes() for file in directory.glob("*.safetensors")}
    return directory.name, files


# --- read-only for a while ------------------------------------------------------------------------


@pytest.fixture
def mounted(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own in memory, which can be mounted anew."""
    place = tmp_path / "mounted"
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "tmpfs", str(place)]
    mount = subprocess.run(command, capture_output=True, check=False)
    if mount.returncode != 0:
        pytest.skip("this user may mount nothing")
    try:
        yield place
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True)


def mount_again(place: Path, mode: str) -> None:
    subprocess.run(["mount", "-o", f"remount,{mode}", str(place)], check=True)


@pytest.mark.slow
def test_a_file_system_that_is_read_only_for_a_while_loses_nothing(
    mounted: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A file that is open to be written keeps a file system from being read-only: only what is
    opened anew fails.
    """
    monkeypatch.setattr("surefoot.run.checkpointing._RETRY_S", 0.0)
    small_runs.build(tmp_path / "whole").train()
    disk = ReadOnlyForAWhile()
    with small_runs.build(mounted / "run", console=True, disk=disk) as run:
        for step in run:
            disk.read_only = 9 <= step.index < 17

    console = capsys.readouterr().out
    assert "NOT SAVED" in console
    assert "Read-only file system" in console
    assert newest_files(mounted / "run") == newest_files(tmp_path / "whole")


class ReadOnlyForAWhile:
    """The disk, on which nothing can be changed as long as `read_only` is set."""

    CHANGES = ("make_directory", "create", "append", "rename", "remove", "remove_directory")

    def __init__(self) -> None:
        self.read_only = False
        self.disk = Disk()

    def __getattr__(self, name: str) -> Any:
        if self.read_only and name in self.CHANGES:
            raise OSError(errno.EROFS, "Read-only file system")
        return getattr(self.disk, name)


@pytest.mark.slow
def test_a_run_on_a_file_system_that_is_mounted_read_only_is_refused_in_one_sentence(
    mounted: Path,
) -> None:
    small_runs.build(mounted / "run", stop_after="8 steps").train()
    mount_again(mounted, "ro")
    try:
        with pytest.raises(sf.ConfigError, match="Read-only file system"):
            small_runs.build(mounted / "run").train()
    finally:
        mount_again(mounted, "rw")

    run = small_runs.build(mounted / "run")
    run.train()
    assert run.state.step == 26


# --- NFS and the like -----------------------------------------------------------------------------


def test_a_file_system_without_locks_is_said_and_trained_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def no_locks(*_: Any) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("fcntl.lockf", no_locks)
    run_dir = tmp_path / "run"
    run = small_runs.build(run_dir, console=True)

    run.train()

    assert run.state.step == 26
    notes = lines_naming(capsys.readouterr().out, "note: ", f" {run_dir} ")
    assert len(notes) == 1


class Stale:
    """A disk on a server: every third listing and reading fails once with ESTALE, as where a
    directory was renamed there.
    """

    def __init__(self) -> None:
        self.calls = 0
        self.disk = Disk()

    def __getattr__(self, name: str) -> Any:
        if name in ("create", "flush", "rename"):
            self.calls += 1
            if self.calls % 7 == 0:
                raise OSError(errno.ESTALE, "Stale file handle")
        return getattr(self.disk, name)


@pytest.mark.slow
def test_saves_that_fail_on_a_server_are_said_and_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("surefoot.run.checkpointing._RETRY_S", 0.0)
    small_runs.build(tmp_path / "whole").train()
    with small_runs.build(tmp_path / "run", console=True, disk=Disk()) as run:
        assert run.parts.checkpointing is not None
        run.parts.checkpointing.store.disk = Stale()
        for step in run:
            if step.index == 22:
                run.parts.checkpointing.writer.wait()
                run.parts.checkpointing.store.disk = Disk()

    assert "Stale file handle" in capsys.readouterr().out
    assert newest_files(tmp_path / "run") == newest_files(tmp_path / "whole")


# --- kills in a save of 300 MB --------------------------------------------------------------------


def large(run_dir: Path) -> sf.Run:
    width = int((MEGABYTES * 1e6 / 12) ** 0.5)
    generator = torch.Generator().manual_seed(0)
    return sf.Run(
        model=lambda: nn.Linear(width, width, bias=False),
        loss=lambda model, batch: model(batch[0]).square().mean(),
        train_data=(torch.randn(16, width, generator=generator),),
        batch_size=4,
        length="6 steps",
        optimizer=sf.optim.adamw(lr=1e-3),
        save_every="2 steps",
        report=False,
        console=False,
        run_dir=run_dir,
    )


def train_large(run_dir: Path) -> None:
    torch.set_num_threads(1)
    large(run_dir).train()


def killed_in_save(process: Any, checkpoints: Path, *, after_s: float) -> None:
    """Kill a process so many seconds after it has begun to write a checkpoint, unless it is over by
    then.
    """
    assert wait_until(lambda: not process.is_alive() or any(checkpoints.glob(".partial-step-*")))
    time.sleep(after_s)
    if process.is_alive():
        os.kill(process.pid, signal.SIGKILL)
    process.join()


@pytest.mark.slow
def test_kills_in_a_save_of_300_megabytes_resume_to_the_same_bits(tmp_path: Path) -> None:
    train_large(tmp_path / "whole")
    run_dir = tmp_path / "killed"
    forks = multiprocessing.get_context("fork")
    for kill in range(8):
        process = forks.Process(target=train_large, args=(run_dir,))
        process.start()
        killed_in_save(process, run_dir / "checkpoints", after_s=0.05 * kill)
    train_large(run_dir)

    assert newest_files(run_dir) == newest_files(tmp_path / "whole")
    assert not [*(run_dir / "checkpoints").glob(".*")]
    assert Store(run_dir / "checkpoints").newest_intact() is not None
