"""Run notebook.ipynb from top to bottom and keep what it puts out.

Owns how it is run and what of a run is kept: nothing that differs from run to run.

    python scripts/run_notebook.py
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import nbclient
import nbformat

from zerosim.records.files import write_whole

ROOT = Path(__file__).parents[1]
NOTEBOOK = ROOT / "notebook.ipynb"
SECONDS = 120  # for all of it


def read() -> Any:
    """The notebook as it is committed."""
    return nbformat.read(NOTEBOOK, as_version=4)  # type: ignore[no-untyped-call]


def run(timeout: int = SECONDS) -> Any:
    """It, run anew in a fresh interpreter. CellExecutionError if a cell raises, CellTimeoutError if one is slow."""
    notebook = read()
    client = nbclient.NotebookClient(
        notebook, timeout=timeout, kernel_name="python3", resources={"metadata": {"path": ROOT}}, record_timing=False,
        coalesce_streams=True,
    )  # fmt: skip
    client.create_kernel_manager().transport = "ipc"  # nothing that others on the machine could listen to
    client.execute()
    notebook.metadata = {"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}}
    return notebook


def main() -> None:
    """Run it, and write it with its outputs."""
    text: str = nbformat.writes(run())  # type: ignore[no-untyped-call]
    write_whole(NOTEBOOK, text.encode() + b"\n")


if __name__ == "__main__":
    main()
