"""The files of one checkpoint on disk, checked against its manifest, and the older checkpoints that
have its frozen tensors.
"""

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path

from surefoot.checkpoint.filesystem import Disk
from surefoot.checkpoint.format import DamageError, damage_error, reason_of
from surefoot.checkpoint.manifest import MANIFEST, STATE, Base, from_bytes, logical_name
from surefoot.checkpoint.tensor_file import CHUNK_BYTES

_MANIFEST_BYTES = 16 << 20  # far above the size of any manifest; larger files are not read


class Source:
    """The files of a checkpoint. Damage is damage of the checkpoint `of` that needs them, if they
    are a base.
    """

    def __init__(self, directory: Path, disk: Disk, *, of: Path | None = None) -> None:
        self.directory = directory
        self.disk = disk
        self.of = of
        with self.damage_in(MANIFEST):
            size = disk.size(directory / MANIFEST)
            if size > _MANIFEST_BYTES:
                raise ValueError(f"{size} bytes long, too long for a manifest")
            self.manifest = from_bytes(disk.read(directory / MANIFEST, start=0, length=size))

    @contextmanager
    def damage_in(self, file: str) -> Iterator[None]:
        try:
            yield
        except FileNotFoundError as problem:
            raise self.damage(f"{file}: missing") from problem
        except OSError as problem:
            raise self.damage(f"{file}: cannot be read: {problem.strerror or problem}") from problem
        except (ValueError, RecursionError) as problem:
            raise self.damage(f"{file}: {reason_of(problem)}") from problem

    def damage(self, problem: str) -> DamageError:
        if self.of is None:
            return damage_error(self.directory, problem)
        return damage_error(self.of, f"{self.directory.name}/{problem}")

    def check_length(self, file: str) -> int:
        with self.damage_in(file):
            length = self.disk.size(self.directory / file)
        saved_length, _ = self.manifest.files[file]
        if length != saved_length:
            raise self.damage(f"{file}: {length} bytes long, but {saved_length} bytes were saved")
        return length

    def chunks(self, file: str) -> Iterator[bytes]:
        """Yield the bytes of a file; raise `DamageError` at the end if their hash differs."""
        length = self.check_length(file)
        digest = sha256()
        with self.damage_in(file):
            for start in range(0, length, CHUNK_BYTES):
                chunk_bytes = min(CHUNK_BYTES, length - start)
                chunk = self.disk.read(self.directory / file, start=start, length=chunk_bytes)
                digest.update(chunk)
                yield chunk
        _, saved_digest = self.manifest.files[file]
        if digest.hexdigest() != saved_digest:
            raise self.damage(f"{file}: hash differs")


def bases_of(source: Source, only: Collection[str] | None) -> Iterator[tuple[Source, Base]]:
    """Yield the older checkpoints with tensors of the entries in `only`; raise `DamageError` if one
    has changed.
    """
    for base in source.manifest.bases:
        if only is None or base.tensors.keys() & set(only):
            yield _find_base(source, base), base


def _find_base(source: Source, base: Base) -> Source:
    name = f"step-{base.step:08d}"
    # `directory` may be a link
    parents = dict.fromkeys([source.directory.parent, source.directory.resolve().parent])
    for parent in list(parents):
        branch = parent.parent
        if branch.parent.name == "branches":  # which the run has left, with its older checkpoints
            parents[branch.parent.parent / "checkpoints"] = None
    candidates = []
    for parent in parents:
        candidates += [parent / name, parent / f".replaced-{name}"]
    why = "is missing"
    for directory in candidates:
        if source.disk.is_directory(directory):
            try:
                candidate = Source(directory, source.disk, of=source.directory)
            except DamageError as error:
                why = f"is damaged: {error.damage.problem.partition('/')[2]}"
            else:
                if candidate.manifest.sha256 == base.sha256:
                    return candidate
                why = "is another checkpoint than at the save"
    raise damage_error(
        source.directory,
        f"{name}, which has {base.count} of its frozen tensors, {why}",
        cure=f"copy the {name} of the same run into {source.directory.parent}",
    )


def files_of_bases(source: Source, only: Collection[str] | None) -> list[tuple[Source, str]]:
    """Return the files of older checkpoints that a read of the entries in `only` (None: all)
    needs.
    """
    files = []
    for base_source, base in bases_of(source, only):
        for name in base.tensors:
            if only is None or name in only:
                files += [(base_source, file) for file in pieces_of(base_source, name)]
    return files


def pieces_of(source: Source, name: str) -> list[str]:
    """Return the files of an entry: one for each rank if its tensors are sharded."""
    stems = [file.removesuffix(".safetensors") for file in source.manifest.files if file != STATE]
    return [f"{stem}.safetensors" for stem in sorted(stems) if logical_name(stem) == name]
