"""How soon `surefoot report --watch DIR` answers for 50 runs of a million records, from its cache.

    python benchmarks/live_page.py [--runs 50] [--records 1000000] [--rounds 10] [--dir DIR]

Measures the server: from the request to the last byte of the page, as a client on this machine sees
it, and the start of the process that serves it. It is no time of a browser, which also draws the
page. One run is written and read through `FollowedRun`; the other runs are links to its records with
a cache each, since reading 50 of them takes an hour.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from http.client import HTTPConnection
from pathlib import Path
from random import Random
from statistics import median
from time import perf_counter


def write_records(file: Path, count: int) -> None:
    """Records as a run writes them, about 490 bytes each."""
    random = Random(0)
    with file.open("w") as out:
        for step in range(1, count + 1):
            loss = 1 + 2 / (1 + 20 * step / count) + random.gauss(0, 0.05)
            times = {
                "training_s": 0.0812,
                "data_wait_s": 0.0013,
                "evaluating_s": 0.0,
                "saving_s": 0.0,
                "user_s": 0.0,
            }
            record = {
                "kind": "train",
                "step": step,
                "loss": loss,
                "skipped": 0,
                "grad_norm": 0.5,
                "grad_norm_max": 0.9,
            }
            record |= {
                "loss_max": loss + 0.3,
                "loss_max_step": step,
                "clip_fraction": 0.25,
                "lr": 1e-3,
                "samples": 64,
            }
            record |= {
                "targets": 640.0,
                "targets_per_s": 7110.5,
                "samples_per_s": 711.05,
                "starting_s": 0.0,
                **times,
            }
            record |= {
                "host_memory_bytes": 3 << 30,
                "host_memory_peak_bytes": 3 << 30,
                "eta_s": 3.0,
            }
            out.write(json.dumps(record) + "\n")
            if step % 1000 == 0:
                out.write(
                    json.dumps(
                        {
                            "kind": "eval",
                            "step": step,
                            "val/loss": loss,
                            "val/accuracy": 1 - loss / 4,
                        }
                    )
                    + "\n"
                )
        out.write(json.dumps({"kind": "event", "step": count, "event": "finished"}) + "\n")


def measured(runs: Path, rounds: int) -> tuple[list[float], list[float], list[float], list[int]]:
    """Milliseconds until a process has its address, of its first page, and of one with curves; and
    the bytes of both.
    """
    command = [sys.executable, "-m", "surefoot", "report", "--watch", str(runs)]
    starts = list[float]()
    answers = list[float]()
    chosen = list[float]()
    sizes = [0, 0]
    for _ in range(rounds):
        began = perf_counter()
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            address = re.match(r"open http://([\d.]+):(\d+)(\S+)", process.stdout.readline())
            assert address is not None
            starts.append(1000 * (perf_counter() - began))
            host, port, path = address.groups()
            key = ""
            for index, times in enumerate((answers, chosen)):
                began = perf_counter()
                connection = HTTPConnection(host, int(port))
                connection.request("GET", path + f"?run={key}" * index)
                page = connection.getresponse().read()
                times.append(1000 * (perf_counter() - began))
                sizes[index] = len(page)
                (key, *_) = re.findall(r'data-run="(\w+)"', page.decode())
                assert b"reading its records" not in page
            process.terminate()
    return starts, answers, chosen, sizes


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--runs", type=int, default=50)
    parser.add_argument("--records", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument(
        "--dir",
        type=Path,
        help="where records and cache are written; default: a temporary directory",
    )
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.dir) as place:
        os.environ["XDG_CACHE_HOME"] = str(Path(place) / "cache")
        from surefoot.tools.report.directory_watch import DirectoryWatch
        from surefoot.tools.report.followed import read_followed

        runs = Path(place) / "runs"
        for index in range(options.runs):
            run = runs / f"run-{index:02}"
            run.mkdir(parents=True)
            (run / "config.toml").write_text(
                f'length = "{options.records} steps"\n[program]\nkind = "script"\n'
            )
            if index == 0:
                write_records(run / "metrics.jsonl", options.records)
            else:
                os.link(runs / "run-00" / "metrics.jsonl", run / "metrics.jsonl")
        size = (runs / "run-00" / "metrics.jsonl").stat().st_size
        watch = DirectoryWatch(runs)
        watch.look()
        first = next(run for run in watch.runs.values() if run.name == "run-00")
        began = perf_counter()
        while watch._advance(first):
            pass
        cold_s = perf_counter() - began
        followed = read_followed(first.path)
        row = first.row
        assert row is not None
        for watched in watch.runs.values():
            followed.path = watched.path
            followed.save(row)
        starts, answers, chosen, sizes = measured(runs, options.rounds)
        print(
            f"{options.runs} runs of {options.records:,} records ({size / 1e6:.0f} MB each), from the cache, server times:\n"
            f"first page: median {median(answers):.0f} ms, worst {max(answers):.0f} ms, {sizes[0] / 1000:.0f} kB\n"
            f"page with the curves of one run: median {median(chosen):.0f} ms, worst {max(chosen):.0f} ms, {sizes[1] / 1000:.0f} kB\n"
            f"start of the process until its address: median {median(starts):.0f} ms\n"
            f"first reading of one run without a cache: {cold_s:.1f} s, in slices, while the page answers"
        )


if __name__ == "__main__":
    main()
