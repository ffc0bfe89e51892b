"""Run the cells of examples/notebook.ipynb in an empty directory, and write their outputs into the
file: python docs/run_notebook.py.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient

NOTEBOOK = Path(__file__).parents[1] / "examples" / "notebook.ipynb"


def executed(path: Path) -> Any:
    """The notebook with new outputs. A cell with the tag `raises-exception` may be interrupted;
    another error is raised.
    """
    notebook = nbformat.read(path, as_version=4)
    with tempfile.TemporaryDirectory() as directory:
        resources = {"metadata": {"path": directory}}
        NotebookClient(notebook, timeout=300, record_timing=False, resources=resources).execute()
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs = joined(cell.outputs)
    return notebook


def joined(outputs: list[Any]) -> list[Any]:
    """The outputs with neighboring texts as one: how a kernel cuts its text depends on the time."""
    merged = list[Any]()
    for output in outputs:
        if merged and output.output_type == "stream" and merged[-1].get("name") == output.name:
            merged[-1].text += output.text
        else:
            merged.append(output)
    return merged


def main() -> None:
    path = Path(sys.argv[1]) if sys.argv[1:] else NOTEBOOK
    notebook = executed(path)
    notebook.metadata = {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}
    }
    path.write_text(nbformat.writes(notebook) + "\n", encoding="utf-8")
    print(f"{path}: {sum(cell.cell_type == 'code' for cell in notebook.cells)} cells were run")


if __name__ == "__main__":
    main()
