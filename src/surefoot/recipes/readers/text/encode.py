"""Encoding of texts in several processes, in order. This module avoids torch, so that the processes
start quickly.
"""

import os
import signal
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import current_process, get_context, parent_process

import numpy as np

from surefoot.data.text.shards import Tokens
from surefoot.errors import ConfigError, DataError
from surefoot.tokenizers.bpe import from_json
from surefoot.tokenizers.tokenizer import Tokenizer

_of_this_process: list[Tokenizer] = []  # the tokenizer of this pool process


class RefusedTextError(Exception):
    """A text that the tokenizer cannot encode: its index in the batch, and the tokenizer's error."""

    def __init__(self, index: int, why: DataError) -> None:
        super().__init__(index, why)
        self.index = index
        self.why = why


def encode_batches(
    batches: Iterable[list[str]], tokenizer: Tokenizer, *, processes: int
) -> Iterator[list[Tokens]]:
    """Yield the tokens of each text of each batch, in order, with the end token after each text.

    An empty text has no tokens, not even the end token. Up to 2 batches per process are queued. If
    `processes` is 1, this process encodes the texts. If a text cannot be encoded,
    `RefusedTextError` is raised after all earlier batches are yielded.
    """
    if processes == 1:
        for batch in batches:
            yield _encode(tokenizer, batch)
        return
    pool = ProcessPoolExecutor(
        processes,
        mp_context=get_context("spawn"),
        initializer=_init_worker,
        initargs=(tokenizer.to_json(),),
    )
    waiting: deque[Future[list[Tokens]]] = deque()
    try:
        for batch in batches:
            waiting.append(pool.submit(_encode_here, batch))
            if len(waiting) > 2 * processes:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    except BrokenProcessPool as problem:
        raise DataError(
            "encoding-process-died",
            problem="an encoding process died: was there too little memory?",
            remedy=[
                "the same command continues, also with fewer processes",
                'in a script, the call must stand below: if __name__ == "__main__":',
            ],
        ) from problem
    finally:
        pool.shutdown(cancel_futures=True)


def refuse_script_read_again() -> None:
    """Raise `ConfigError` if a pool process re-imports the main script, which would start another
    pool.
    """
    # the name is set before the script is imported again, and the parent only afterwards
    is_importing = current_process().name != "MainProcess" and parent_process() is None
    if is_importing:
        raise ConfigError(
            "script-encodes-at-import",
            problem="each encoding process imports the script, and reached the call that starts such"
            " processes",
            remedy='put the call below: if __name__ == "__main__":',
        )


def encode_texts(tokenizer: Tokenizer, texts: Sequence[str]) -> list[Tokens]:
    """Return the tokens of each text. Raises `RefusedTextError`, with the text's index, if one
    cannot be encoded.
    """
    try:
        return tokenizer.encode_all(texts)
    except DataError:
        for index, text in enumerate(texts):
            try:
                tokenizer.encode(text)
            except DataError as problem:
                raise RefusedTextError(index, problem) from problem
        raise


def _encode(tokenizer: Tokenizer, texts: list[str]) -> list[Tokens]:
    end = [] if tokenizer.eos_id is None else [tokenizer.eos_id]
    rows = []
    for text, tokens in zip(texts, encode_texts(tokenizer, texts), strict=True):
        if text:
            rows.append(np.concatenate([tokens, np.array(end, dtype=tokens.dtype)]))
        else:
            rows.append(tokens[:0])
    return rows


def _encode_here(texts: list[str]) -> list[Tokens]:
    return _encode(_of_this_process[0], texts)


def _init_worker(tokenizer: str) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one thread per process
    _of_this_process.append(from_json(tokenizer))
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
