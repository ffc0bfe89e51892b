"""Notebooks in a real kernel: interrupts, runs that go on, and the example with its committed
outputs. (1 s; a kernel 25 s)
"""

from __future__ import annotations

import asyncio
import json
import re
import sys
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
PROGRESS, ANSWERED = "<progress ", "Ctrl-C: finishing this step"
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
    shown = (output.get("data", {"text": output.get("text", "")}) for output in cell.outputs)
    return "\n".join(text for bundle in shown for text in bundle.values())


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
    notebook = nbformat.v4.new_notebook(
        cells=[nbformat.v4.new_code_cell(source) for source in sources]
    )
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
        stopped = re.search(r"stopped by Ctrl-C at step (\d+) of 200", texts(cell))
        assert stopped is not None
        assert 0 < int(stopped[1]) < 200
    assert "not reached" not in texts(cells[1])


@pytest.mark.slow
def test_a_second_interrupt_leaves_the_kernel_and_the_newest_checkpoint(cells: list[Any]) -> None:
    stopped = re.search(r"stopped by Ctrl-C at step (\d+) of 200", texts(cells[1]))
    assert stopped is not None
    assert ANSWERED in texts(cells[3])
    assert f"the newest checkpoint is at step {stopped[1]}" in texts(cells[3])
    assert f"resuming at step {stopped[1]}" in texts(cells[4])


@pytest.mark.slow
def test_the_next_cell_goes_on_with_the_bits_of_an_uninterrupted_run(cells: list[Any]) -> None:
    for cell in cells[4:6]:
        assert "finished: 200 steps" in texts(cell)
        (output,) = [output for output in cell.outputs if output.output_type == "display_data"]
        assert "<td>200</td>" in output.data["text/html"]
        assert output.data["text/html"].count("<iframe srcdoc=") == 1
        assert PROGRESS not in output.data["text/html"]
    assert cells[-1].outputs[-1].data["text/plain"] == "[True, True]"


@pytest.mark.slow
def test_a_run_and_a_saved_run_show_themselves(cells: list[Any]) -> None:
    for cell, name in zip(cells[6:9], ("run", "run", "run"), strict=True):
        html = cell.outputs[0].data["text/html"]
        assert f"<b>{name}</b> finished: 200 steps; val/loss fell from" in html
        assert html.count("<iframe srcdoc=") == 1


# --- the example ----------------------------------------------------------------------------------


def outline(notebook: Any) -> list[tuple[str, list[tuple[str, list[str]]]]]:
    """The source of each cell, with the kinds of its outputs."""
    return [
        (
            "".join(cell["source"]),
            [
                (output["output_type"], sorted(output.get("data", ())))
                for output in cell.get("outputs", ())
            ],
        )
        for cell in notebook["cells"]
    ]


def test_the_example_was_run_from_top_to_bottom_without_an_error_and_names_no_machine() -> None:
    text = EXAMPLE.read_text()
    code = [cell for cell in json.loads(text)["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in code] == [*range(1, len(code) + 1)]
    kinds = {output["output_type"] for cell in code for output in cell["outputs"]}
    assert kinds == {"display_data", "execute_result", "stream"}
    assert {output["name"] for cell in code for output in cell["outputs"] if "name" in output} == {
        "stdout"
    }
    assert re.findall(r"(?<![\w.<])/(?:tmp|home|root|work|Users|dev|usr|opt)/", text) == []


@pytest.mark.slow
def test_the_example_runs_and_its_outputs_are_of_the_committed_kinds() -> None:
    """After a change, `make notebook` writes them again."""
    pytest.importorskip("nbclient")
    from run_notebook import executed

    assert outline(executed(EXAMPLE)) == outline(json.loads(EXAMPLE.read_text()))
