"""Each rank's own source of a stream, of which only that of rank 0 is recorded: its first rows must
be those of rank 0. A source that the script has split by rank would lose the shares of the others.
"""

import threading

import numpy as np

from surefoot.data.same_on_ranks import UNSPLIT
from surefoot.data.streams.reader import Beginning, HowToRead
from surefoot.data.streams.shards import ENTRY, ZERO
from surefoot.data.streams.source_reader import SourceReader
from surefoot.data.streams.stream import Stream
from surefoot.data.streams.tape import Tape
from surefoot.distributed.world import World
from surefoot.errors import DataError

_ROWS = 8  # that are compared
_RANKS = 8  # that read their own source, at most
_LIMIT_S = 30.0  # for which the rows of a rank's own source are awaited


def refuse_own_shares(stream: Stream, how: HowToRead, tape: Tape, world: World) -> None:
    """Raise `DataError` if a rank's own source begins with other rows than the tape. Collective.

    A source that differs when the rank reads it again draws its order without a seed, so it cannot
    be compared. A source that a rank cannot read, or that takes long, is not compared. The tape has
    its first rows by now, so no reader here takes from rank 0's what only one process may have.
    """
    rows = min(_ROWS, tape.head, tape.shards.look())
    # of many ranks, some
    chosen = np.linspace(1, world.size - 1, min(_RANKS, world.size - 1)).astype(int)
    own = None
    if world.is_main:
        own = tape.shards.entry_before(rows)[1].hex()
    elif world.rank in chosen:
        own = _digest(stream, how, rows)
    digests = world.gathered(own)
    others = [rank for rank, digest in enumerate(digests) if digest not in (None, digests[0])]
    if not others:
        return
    digests_again = world.gathered(_digest(stream, how, rows) if world.rank in others else None)
    for rank in others:
        if digests_again[rank] == digests[rank]:
            raise DataError(
                "stream-split-by-rank",
                problem=f"the source of the stream gives other rows on rank {rank} than on rank 0",
                reason="rank 0 alone reads its source, for all ranks: the rows of a source that was split"
                " by rank would be missing",
                remedy=[UNSPLIT, "if the source draws its order, give it a fixed seed"],
                rank=rank,
            )


def _digest(stream: Stream, how: HowToRead, rows: int) -> str | None:
    """Return the hash of the first rows of this rank's own source, or of all if they are fewer;
    None if they do not arrive.
    """
    try:
        reader = SourceReader(stream, how, Beginning(0, 0, ZERO, tail={}, states=[], head=0))
    except DataError:
        return None
    limit = threading.Timer(_LIMIT_S, reader.close)
    limit.start()
    digests = [ZERO.hex()]
    while len(digests) <= rows:
        message = reader.receive()
        if message is None or message[:1] in (b"x", b"e"):
            break
        if message[:1] == b"r":
            count = int.from_bytes(message[1:5], "little")
            entries = ENTRY.iter_unpack(message[5 : 5 + count * ENTRY.size])
            digests += [digest.hex() for _, digest in entries]
    limit.cancel()
    reader.close()
    reader.join()
    has_ended = message is not None and message[:1] == b"e"
    if len(digests) <= rows and not has_ended:
        return None
    return digests[: rows + 1][-1]
