"""Notebooks in a real kernel: interrupts, runs that go on, and the example with its committed
outputs. (1 s; a kernel 25 s)
"""

from __future__ import annotations

import asyncio
import json
import re
import sys
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

from waiting import HANG_S

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "docs"))
EXAMPLE = ROOT / "examples" / "notebook.ipynb"

SETUP = """
import time
import torch
import surefoot as sf

hangs = False
inputs = torch.linspace(-1, 1, 256)[:, None]

def loss(model, batch):
    if hangs and torch.is_grad_enabled():
        print("in a step")
        while hangs:
            time.sleep(0.005)
    time.sleep(0.005)
    return (model(batch[0]) - batch[1]).square().mean()

def build(run_dir):
    data = (inputs, 3 * inputs)
    return sf.Run(model=lambda: torch.nn.Linear(1, 1), loss=loss, train_data=data, splits={"val": sf.Split(data)},
        evaluate_every="40 steps", batch_size=16, length="200 steps", optimizer=sf.optim.sgd(lr=0.05), device="cpu",
        precision="fp32", tensorboard=False, run_dir=run_dir)

run, in_memory = build("run"), build(None)
"""
PROGRESS = "<progress "
ANSWERED = "Ctrl-C: finishing this step"
INTERRUPTED = {  # cells, and the texts in their outputs at which the button is pressed
    "run.train()\nprint('not reached')": [PROGRESS],
    "in_memory.train()": [PROGRESS],
    "hangs = True\nrun.train()": ["in a step", ANSWERED],
}
OTHERS = [
    "hangs = False\nrun.train()",
    "in_memory.train()  # goes on",
    "run",
    "sf.load('run')",
    "in_memory",
]
COMPARED = """
plain = build(None)
plain.train()
[*map(torch.equal, run.state.model.parameters(), plain.state.model.parameters())]
"""


def texts(cell: Any) -> str:
    """All that stands in the outputs of a cell."""
    lines = []
    for output in cell.outputs:
        if "data" in output:
            lines += output["data"].values()
        else:
            lines.append(output.get("text", ""))
    return "\n".join(lines)


def html_of(cell: Any) -> str:
    """The one table that a cell displays."""
    (output,) = [output for output in cell.outputs if "text/html" in output.get("data", {})]
    html: str = output["data"]["text/html"]
    return html


def step_of_interrupt(cell: Any) -> int:
    """The step of 200 at which a cell says that it was stopped."""
    match = re.search(r"stopped by Ctrl-C at step (\d+) of 200", texts(cell))
    assert match is not None
    return int(match[1])


@pytest.fixture(scope="module")
def cells(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """The cells of a notebook that was run in a kernel, three of them interrupted as the button
    does it.
    """
    nbformat = pytest.importorskip("nbformat")
    nbclient = pytest.importorskip("nbclient")
    pressing = set[asyncio.Task[None]]()

    async def press(cell: Any, cell_index: int) -> None:
        async def when_due() -> None:
            for text in INTERRUPTED.get(cell.source, ()):
                while text not in texts(cell):
                    await asyncio.sleep(0.01)
                await client.km.interrupt_kernel()

        pressing.add(asyncio.create_task(when_due()))

    sources = [SETUP, *INTERRUPTED, *OTHERS, COMPARED]
    notebook = nbformat.v4.new_notebook(cells=[*map(nbformat.v4.new_code_cell, sources)])
    resources = {"metadata": {"path": str(tmp_path_factory.mktemp("kernel"))}}
    client = nbclient.NotebookClient(
        notebook, timeout=HANG_S, allow_errors=True, resources=resources, on_cell_execute=press
    )
    client.execute()
    return [*notebook.cells]


@pytest.mark.slow
def test_no_cell_has_a_traceback_or_red_text(cells: list[Any]) -> None:
    kinds = {(output.output_type, output.get("name")) for cell in cells for output in cell.outputs}
    assert kinds == {("display_data", None), ("execute_result", None), ("stream", "stdout")}


@pytest.mark.slow
def test_an_interrupted_cell_ends_there_and_says_where_the_run_stands(cells: list[Any]) -> None:
    for cell in cells[1:3]:
        assert 0 < step_of_interrupt(cell) < 200
    assert "not reached" not in texts(cells[1])


@pytest.mark.slow
def test_a_second_interrupt_leaves_the_kernel_and_the_newest_checkpoint(cells: list[Any]) -> None:
    step = step_of_interrupt(cells[1])
    assert ANSWERED in texts(cells[3])
    assert f"the newest checkpoint is at step {step}" in texts(cells[3])
    assert f"resuming at step {step}" in texts(cells[4])


@pytest.mark.slow
def test_the_next_cell_goes_on_with_the_bits_of_an_uninterrupted_run(cells: list[Any]) -> None:
    for cell in cells[4:6]:
        assert "finished: 200 steps" in texts(cell)
        html = html_of(cell)
        assert "<td>200</td>" in html
        assert html.count("<iframe srcdoc=") == 1
        assert PROGRESS not in html
    assert cells[-1].outputs[-1].data["text/plain"] == "[True, True]"


@pytest.mark.slow
def test_a_run_and_a_saved_run_show_themselves(cells: list[Any]) -> None:
    for cell in cells[6:9]:
        html = html_of(cell)
        assert "<b>run</b> finished: 200 steps; val/loss fell from" in html
        assert html.count("<iframe srcdoc=") == 1


# --- the example ----------------------------------------------------------------------------------


def outline(notebook: Any) -> list[tuple[str, list[tuple[str, list[str]]]]]:
    """The source of each cell, with the kinds of its outputs."""
    cells = []
    for cell in notebook["cells"]:
        kinds = [
            (output["output_type"], sorted(output.get("data", ())))
            for output in cell.get("outputs", ())
        ]
        cells.append(("".join(cell["source"]), kinds))
    return cells


def test_the_example_was_run_from_top_to_bottom_without_an_error() -> None:
    cells = json.loads(EXAMPLE.read_text())["cells"]
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    outputs = [*chain.from_iterable(cell["outputs"] for cell in code)]

    assert [cell["execution_count"] for cell in code] == [*range(1, len(code) + 1)]
    kinds = {output["output_type"] for output in outputs}
    assert kinds == {"display_data", "execute_result", "stream"}
    assert {output["name"] for output in outputs if "name" in output} == {"stdout"}


def test_the_example_names_no_machine() -> None:
    folder = r"(?<![\w.<])/(?:tmp|home|root|work|Users|dev|usr|opt)/"
    assert re.findall(folder, EXAMPLE.read_text()) == []


@pytest.mark.slow
def test_the_example_runs_and_its_outputs_are_of_the_committed_kinds() -> None:
    """After a change, `make notebook` writes them again."""
    pytest.importorskip("nbclient")
    from run_notebook import executed

    assert outline(executed(EXAMPLE)) == outline(json.loads(EXAMPLE.read_text()))
