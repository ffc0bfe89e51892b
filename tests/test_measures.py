"""The mirrors of source and prose, docs/measure.py and docs/prose.py, count what they say. (1 s)"""

import ast
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "docs"))
import measure
from prose import Sentence, split


def a_file(text: str, path: str) -> measure.File:
    return measure.File(measure.SOURCE / path, text, ast.parse(text))


def test_a_sentence_ends_at_a_full_stop_and_code_in_it_is_no_turn() -> None:
    text = (
        "Read the file. It has [a link](so-many.md), e.g. one."
        "\n\nOf a run, so many\nsteps are kept: so it goes."
    )
    parts = list(split(text))
    assert parts == [
        "Read the file.",
        "It has a link, e.g. one.",
        "Of a run, so many steps are kept: so it goes.",
    ]
    turns = [Sentence("docs", "", part).turns for part in parts]
    assert turns == [[], [], ["fronted 'Of a ..., '", "'so many', 'so-manieth'"]]
    optimiser = "The `optimiser` is `none`, and it is no longer a second step."
    assert Sentence("docs", "", optimiser).turns == []


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a = 1", {"tokens": 3, "statements": 1}),
        ("a = 1  # one\n\n", {"tokens": 3, "statements": 1}),
        ("'''Doc\nstring.'''", {"statements": 1}),
        ("a = b if c else d", {"tokens": 7, "statements": 1, "ternaries": 1}),
        ("a, b = c, d", {"tokens": 7, "statements": 1, "parallel": 1}),
        ("a, b = c", {"tokens": 5, "statements": 1}),
        ("{a for b in {c: d for e in f}}", {"tokens": 15, "statements": 1, "comprehensions": 2}),
    ],
)
def test_each_count_of_a_file(text: str, expected: dict[str, int]) -> None:
    counts = vars(measure.measure(text))
    assert {name: count for name, count in counts.items() if count} == {"files": 1, **expected}


def test_a_class_name_in_two_files_occurs_twice() -> None:
    files = [a_file("class Row: ...\nclass Only: ...", "a.py"), a_file("class Row: ...", "b.py")]
    assert measure.repeated_class_names(files) == {"Row": ["a.py:1", "b.py:1"]}


def test_names_that_a_tool_imports_from_the_core() -> None:
    text = (
        "from surefoot.train.loop import Step, Task\n"
        "from surefoot.tools.report.page import write\n"
        "from torch import Tensor\n"
    )
    files = [a_file(text, "tools/verify/verify.py"), a_file(text, "data/order.py")]
    assert measure.names_from_the_core(files) == {"train.loop": ["Step", "Task"]}


def test_a_module_that_reads_many_fields_of_parts() -> None:
    text = "\n".join(f"self.parts.{name}" for name in "abcdef")
    files = [a_file(text, "run/a.py"), a_file("parts.a + parts.b", "run/b.py")]
    assert measure.fields_of_parts(files) == {"run/a.py": list("abcdef")}


def test_chains_of_three_dots_that_begin_with_an_object() -> None:
    text = "import torch\nrun.parts.state.step\nrun.parts.state\ntorch.nn.functional.pad(x)"
    assert measure.chains([a_file(text, "run/a.py")]) == ["run/a.py:2 run.parts.state.step"]


# what a run with tensors, SGD and one split on one process has no use for
UNUSED = [
    "data.orders",
    "data.same_on_ranks",
    "data.streams",
    "data.torch_loader",
    "data.workers",
    "distributed.consistency",
    "distributed.ddp",
    "distributed.exact_ddp",
    "distributed.fsdp",
    "distributed.heartbeat",
    "distributed.rank_sums",
    "distributed.rendezvous",
    "distributed.side_channel",
    "metrics.classification",
    "optim.closure_step",
    "optim.ema",
    "optim.kinds.muon",
    "optim.switched_weights",
    "optim.user_optimizer",
    "run.rank_checks",
    "tokenizers",
    "tracking.external",
    "tracking.live_terminal",
    "tracking.notebook",
    "tracking.panels_file",
    "tracking.run_records",
    "tracking.table",
    "train.layer_stats",
    "train.gradient_cache",
    "recipes",
    "schedules.sampling",
]


def test_a_plain_run_loads_the_loop_and_nothing_of_what_it_does_not_use() -> None:
    loaded = measure.loaded_by_a_plain_run()
    assert "surefoot.train.loop" in loaded
    assert [name for name in UNUSED if not measure.path_of(f"surefoot.{name}").exists()] == []
    assert {f"surefoot.{name}" for name in UNUSED} & set(loaded) == set()
