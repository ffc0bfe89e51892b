"""Each rank's own source of a stream, of which only that of rank 0 is read: a source that the script
has split by rank would lose the shares of the others.

The values in the sources are compared, which takes no row from a source that gives each row once.
Only if they differ does one other rank read its first rows.
"""

import threading

from surefoot.data.same_on_ranks import UNSPLIT
from surefoot.data.streams.reader import HowToRead, SourcePosition
from surefoot.data.streams.shards import ENTRY, ZERO
from surefoot.data.streams.source_reader import SourceReader
from surefoot.data.streams.source_values import (
    digests_of_values,
    generators_without_seed,
    values_of_source,
)
from surefoot.data.streams.stream import Stream
from surefoot.data.streams.tape import Tape
from surefoot.distributed.world import World
from surefoot.errors import DataError

_NAMED = 3  # values in a message
_ROWS = 8  # that are compared
_LIMIT_S = 30.0  # for which these rows are awaited


def check_own_sources(tape: Tape, how: HowToRead, world: World) -> None:
    """Raise `DataError` if the source of a rank was split by rank, and say what is noted of the
    sources. Collective.

    The tape has rank 0's first rows by now.
    """
    values = values_of_source(tape.stream.source)
    digests = digests_of_values(values)
    of_main = world.from_main(digests)
    unseeded = generators_without_seed(values)
    differing = []
    for name in sorted({*of_main, *digests}):
        rows, order = digests.get(name, ("", ""))
        rows_of_main, order_of_main = of_main.get(name, ("", ""))
        if rows != rows_of_main:
            differing.append(name)
        elif order != order_of_main:
            unseeded.append(name)
    by_rank = world.gathered([unseeded[:1], differing[:_NAMED]])
    names_of_order = list[str]()
    last_differing = None
    for rank, (unseeded_there, differing_there) in enumerate(by_rank):
        names_of_order += unseeded_there
        if differing_there:
            last_differing = rank
    if names_of_order:
        tape.tell(
            "note: the order of this stream differs between two starts of the program"
            f" ({names_of_order[0]}): give it a fixed seed"
        )
    if last_differing is not None and how.is_one_rank and not tape.stream.same_on_ranks:
        _, names = by_rank[last_differing]
        _compare_rows(tape, how, world, rank=last_differing, names=names)


def _compare_rows(tape: Tape, how: HowToRead, world: World, *, rank: int, names: list[str]) -> None:
    """Let one rank read the first rows of its own source. Raise `DataError` if they differ."""
    rows = min(_ROWS, tape.head, tape.shards.look())
    digest = None
    if world.is_main:
        digest = tape.shards.entry_before(rows)[1].hex()
    elif world.rank == rank:
        digest = _digest_of_rows(tape.stream, how, rows)
    digests = world.gathered(digest)
    values = ", ".join(names)
    if digests[rank] is not None and digests[rank] != digests[0]:
        raise DataError(
            "stream-split-by-rank",
            problem=f"the source of the stream gives other rows on rank {rank} than on rank 0, and"
            f" differs in {values}",
            reason="rank 0 alone reads its source, for all ranks: the rows of a source that was split"
            " by rank would be missing",
            remedy=[
                UNSPLIT,
                "if the source draws its order, give it a fixed seed",
                "if rank 0's source has all rows: sf.data.Stream(source, same_on_ranks=True)",
            ],
            rank=rank,
            values=names,
        )
    outcome = "they did not arrive" if digests[rank] is None else "they are the same"
    tape.tell(
        f"note: the source of rank {rank} differs from that of rank 0 in {values}, so its first"
        f" {rows} rows were read to compare them: {outcome}\n"
        "  if no other rank may read its source: sf.data.Stream(source, same_on_ranks=True)"
    )


def _digest_of_rows(stream: Stream, how: HowToRead, rows: int) -> str | None:
    """Return the hash of the first rows of this rank's own source, or of all if they are fewer;
    None if they do not arrive. No further row is taken from it.
    """
    try:
        reader = SourceReader(
            stream.first_rows(rows),
            how,
            SourcePosition(0, 0, ZERO, tail={}, states=[], head=0),
        )
    except DataError:
        return None
    limit = threading.Timer(_LIMIT_S, reader.close)
    limit.start()
    digest: str | None = ZERO.hex()
    has_ended = False
    while not has_ended:
        message = reader.receive()
        if message is None or message[:1] == b"x":
            digest = None
            break
        has_ended = message[:1] == b"e"
        if message[:1] == b"r":
            count = int.from_bytes(message[1:5], "little")
            entries = list(ENTRY.iter_unpack(message[5 : 5 + count * ENTRY.size]))
            digest = entries[-1][1].hex()
    limit.cancel()
    reader.close()
    reader.join()
    return digest
