"""``zerosim check``: judge a training of one's own from what its ranks have written down. Parse, call, print.

Exit codes: 0 nothing is wrong; 1 something is; 2 what was asked for cannot be judged; 130 interrupted. Heavy
imports wait until it runs.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from zerosim.cli.errors import Refused, errors_for_people, printing


@click.command()
@click.argument("folder", metavar="RUN", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option(
    "--model", metavar="FILE:FUNCTION", default=None,
    help="A function without arguments that returns (module, loss), for a run whose own model could not be written.",
)  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print the verdict as JSON.")
def check(folder: Path, model: str | None, as_json: bool) -> None:
    """Hold a recorded training to the simulator.

    RUN is a folder that check.record has written, one part per rank. Each step is judged from the ranks' own states
    before it: gradients, the optimizer, parameters, what was asked for and what was held. The first line is the answer.
    """
    from zerosim.util import arguments

    with errors_for_people():
        arguments.installed("check", "torch", extra="torch")
    from zerosim.conformance import words
    from zerosim.conformance.recording import judge_run
    from zerosim.records.conformance import encode

    with errors_for_people():
        found = judge_run(folder, None if model is None else _made(model))
    with printing():
        if as_json:
            click.echo(encode(found), nl=False)
        else:
            click.echo(words.text(found, min(words.WIDTH, shutil.get_terminal_size().columns)))
    sys.exit(1 if found.findings else 0)


def _made(model: str) -> tuple[Any, Callable[[Any, Any], Any]]:
    """The module and its loss, from a function in somebody's file."""
    import importlib.util

    path, _, name = model.rpartition(":")
    if not path or not Path(path).is_file():
        raise Refused(f"check(model): a file and a function in it, as in train.py:make; got {model!r}.")
    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    if spec is None or spec.loader is None:
        raise Refused(f"check(model): {path} is no Python file.")
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(Path(path).resolve().parent))
    spec.loader.exec_module(module)
    function = getattr(module, name, None)
    if not callable(function):
        raise Refused(f"check(model): {path} has no function {name!r}.")
    made = function()
    if not (isinstance(made, tuple) and len(made) == 2):
        raise Refused(f"check(model): {model} must return (module, loss); it returned {type(made).__name__}.")
    return made
