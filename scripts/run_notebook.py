"""Run the notebooks from top to bottom and keep what they put out.

Owns how they are run and what of a run is kept: nothing that differs from run to run. Where they open, if the
repository's address is known, comes from ``notebook_links.py``.

    python scripts/run_notebook.py
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import nbclient
import nbformat

import notebook_links
import zerosim
from zerosim.records.files import write_whole

ROOT = Path(__file__).parents[1]
NOTEBOOK, EXERCISES = ROOT / "notebook.ipynb", ROOT / "docs" / "write_zero.ipynb"
SECONDS = 120  # for a cell


def read(path: Path = NOTEBOOK) -> Any:
    """A notebook as it is committed."""
    return nbformat.read(path, as_version=4)  # type: ignore[no-untyped-call]


def run(path: Path = NOTEBOOK, timeout: int = SECONDS) -> Any:
    """It, run anew in a fresh interpreter and an empty folder, where of a checkout there is the package alone.

    CellExecutionError if a cell raises, CellTimeoutError if one is slow.
    """
    notebook = read(path)
    with tempfile.TemporaryDirectory() as folder:
        client = nbclient.NotebookClient(
            notebook, timeout=timeout, kernel_name="python3", resources={"metadata": {"path": folder}},
            record_timing=False, coalesce_streams=True,
        )  # fmt: skip
        kernel = client.create_kernel_manager()
        kernel.transport, kernel.ip = "ipc", f"{folder}/kernel"  # nothing that others on the machine could listen to
        package = Path(str(zerosim.__file__)).parents[1]  # the one that is imported here
        client.execute(env=os.environ | {"PYTHONPATH": str(package)})
    notebook.metadata = {"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}}
    return notebook


def main() -> None:
    """Run them, and write them with their outputs."""
    for path in (NOTEBOOK, EXERCISES):
        told = notebook_links.tell(run(path), path.relative_to(ROOT).as_posix(), notebook_links.address())
        text: str = nbformat.writes(told)  # type: ignore[no-untyped-call]
        write_whole(path, text.encode() + b"\n")


if __name__ == "__main__":
    main()
