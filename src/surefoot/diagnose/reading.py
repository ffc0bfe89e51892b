"""The history of a run from its directory: a running, dead or resumed one, or one of an older version. Torch-free.

Settings are those that its newest checkpoint notes, whatever program made the run; config.toml adds what changes no result.
A damaged or missing file leaves settings out: the records alone say much.
"""

from __future__ import annotations

import sys
from pathlib import Path

from surefoot.config.paths import local_path, open_regular
from surefoot.diagnose.history import Collected, History
from surefoot.diagnose.run_settings import Described, Standing, kinds_of_models
from surefoot.errors import ConfigError
from surefoot.tracking.run_reader import Session, read_records, read_run

_TIMES = 5  # as many records as a run that trains keeps in memory: of training none is thinned out up to 10,000


def history_in(path: Path | str) -> History:
    """The history of the run in a directory; `ConfigError` where there is no run."""
    run = local_path(path, setting="path")
    if not (run / "config.toml").is_file() and not (run / "metrics.jsonl").is_file():
        raise ConfigError(
            f"{run} is no run: it holds neither config.toml nor metrics.jsonl\n"
            "  a run's directory is what --out, or Run(out=...), was given"
        )
    held = collecting()
    try:
        for record in read_records(run) if (run / "metrics.jsonl").is_file() else ():
            held.add(record)
    except OSError as problem:
        raise ConfigError(f"cannot read {run / 'metrics.jsonl'}: {problem.strerror or problem}") from problem
    return held.history(described_in(run))


def collecting() -> Collected:
    """Takes the records of a run that is read, of which there may be any number."""
    return Collected(times=_TIMES)


def described_in(run: Path) -> Described:
    """What the run in a directory was asked to do, as far as its files say."""
    files = read_run(run)
    script, last = files.config.script, files.sessions[-1] if files.sessions else Session()
    processors, memory = last.get("processors"), last.get("memory_bytes")
    return Described(
        made=files.config.of_script if files.state is None else files.state.described,
        written={} if script else files.config.flat,
        program=str(files.config.program.get("kind", "script")),
        kinds=kinds_of_models({} if files.state is None else files.state.architecture),
        standing=standing_of(run),
        name=str(run),
        processors=processors if isinstance(processors, int) else None,
        memory_bytes=memory if isinstance(memory, int) else None,
        saved_step=files.step,
    )


def standing_of(run: Path) -> Standing:
    """Whether a process trains into a directory now: such a one holds its lock; "unknown" where that cannot be told."""
    lock = run / ".lock"
    if "surefoot.tracking.run_directory" in sys.modules:
        from surefoot.tracking.run_directory import held_here

        if held_here(run):  # closing another handle of its own lock would let go of it
            return "running"
    if not lock.exists() or sys.platform == "win32":
        return "unknown"
    import fcntl

    try:
        with open_regular(lock) as file:
            fcntl.lockf(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return "running"
    except OSError:  # not ours to read, or a file system without locks
        return "unknown"
    return "over"
