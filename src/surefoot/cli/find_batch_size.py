"""`surefoot find-batch-size`: measured memory and throughput of micro-batch sizes. It writes no
file.
"""

from dataclasses import dataclass

from surefoot.cli.find_lr import TriedRunOptions, tried_options, tried_run
from surefoot.config.batch_size import batching
from surefoot.program import status_line


@dataclass(frozen=True, kw_only=True)
class FindBatchSize(TriedRunOptions):
    """Measure memory and throughput of the micro-batch sizes that divide the batch.
    Recommend the smallest size that is about as fast as the fastest, with the
    gradient accumulation that keeps the batch size. Nothing is trained or written.

      surefoot find-batch-size gpt --batch-size 64
      surefoot find-batch-size images --preset cifar10 --data.path DIR --memory 4GB
    """

    batch_size: str | None = None
    """Batch size to divide, such as 64, or "4096 tokens" if the run's batch is in tokens. Default:
    the run's batch size.
    """
    memory: str | None = None
    """Memory limit, such as 8GB; 10% of it stays unused. Default: all free memory."""


def find_batch_size(arguments: list[str]) -> None:
    """Run `surefoot find-batch-size`: find the largest micro-batch that fits into memory."""
    options, flags = tried_options(FindBatchSize, arguments, verb="find-batch-size")
    if options.batch_size is not None:
        batching(options.batch_size, None)
    if options.memory is not None:
        from surefoot.memory import parsed_bytes  # imports torch

        parsed_bytes(options.memory, setting="memory")
    run, _ = tried_run(options, flags, verb="find-batch-size")
    from surefoot.tools.tune import find_batch

    with status_line() as show:
        sizes = find_batch.find_batch_size(
            run, batch_size=options.batch_size, memory=options.memory, progress_fn=show
        )
    print(sizes, f"  {find_batch.what_changes_with_it(run)}", sep="\n")
