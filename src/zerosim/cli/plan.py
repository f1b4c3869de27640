"""``zerosim plan``: parse, call, print.

Exit codes: 0 the plan was made; 1 with --check, it does not fit, or only without the reserve;
2 what was asked for cannot be planned; 130 interrupted. Heavy
imports wait until it runs.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from zerosim.cli.errors import Refused, errors_for_people, printing
from zerosim.cli.plan_options import NOT_PLANNED, plan_options
from zerosim.util import sizes

if TYPE_CHECKING:
    from zerosim.planner.model_source import ModelSource
    from zerosim.records.plan import Plan
    from zerosim.records.question import Finetuning, Question

TOLD_EVERY = 15.0  # seconds, where standard error is no terminal


@click.command()
@plan_options
@click.pass_context
def plan(
    context: click.Context, /, model: str, json_to: str | None, outputs: tuple[Path, ...], verbose: bool, check: bool,
    estimators: bool, **options: Any,
) -> None:  # fmt: skip
    """Say what training MODEL takes on N GPUs before they are rented.

    MODEL is a list of layer sizes (4096,16384,4096); a Hugging Face config.json or its folder, or a
    model's name (extra "plan"); or a Python path, package.module:factory, whose code is then run
    (extra "torch").

    Runs the training step itself, on shapes instead of numbers, for every scheme and N, and reads its
    ledger: what a GPU holds at rest and at the peak, by band, when and for which unit; what it sends;
    whether a card holds that. Searches for the smallest N, the first scheme and the largest
    micro-batch that fit by running again with the card's capacity.
    """
    with errors_for_people():
        options = _with_job(context, options)
        if check and options["memory"] is None and options["card"] is None:
            raise ValueError("plan(check): whether it fits takes a card. Use --card H100, or --memory 80GB.")
        question = _question(model, **options)
        targets = _targets(json_to, outputs)
        source, found = _run(question)
        written = _write(targets, source, found)
    with printing():
        if json_to == "-":
            from zerosim.records.plan import encode

            click.echo(encode(found), nl=False)
        else:
            from zerosim.report import plan_console as console

            console.show(found, verbose=verbose, estimates=estimators)
            for path, what in written.items():
                click.echo(f"written to {path}: {what}")
    if check and not found.fits:
        context.exit(1)


def _with_job(context: click.Context, options: dict[str, Any]) -> dict[str, Any]:
    """The options with what the job's configuration says where nothing was typed. ValueError for what isn't planned."""
    from zerosim.planner import job_config

    for name, kind in NOT_PLANNED.items():
        if options.pop(name) > 1:
            raise job_config.refuse(f"{kind} parallelism", name)
    if options.pop("nvme") is not None:
        raise job_config.refuse("offloading to NVMe", "nvme")
    job, options["notes"], options["bucket_elements"] = options.pop("job"), (), None
    if job is not None:
        found = job_config.read(job)
        typed = {name for name in options if context.get_parameter_source(name) is ParameterSource.COMMANDLINE}
        options |= {name: value for name, value in found.options.items() if name not in typed}
        options["notes"] = tuple(found.notes)
    if not options["gpus"]:
        raise ValueError("plan(gpus): how many GPUs? At least one number is needed, as in --gpus 8.")
    return options


def _finetuning(lora: str | None, other_parts: str, frozen_dtype: Any) -> Finetuning:
    """What is trained. ValueError for a text of another form."""
    from zerosim.records.question import Finetuning

    parts: Any = other_parts.replace("-", " ")
    if lora is None:
        return Finetuning(other_parts=parts, frozen_dtype=frozen_dtype)
    match = re.fullmatch(r"r=(\d{1,5})(?:,targets=([\w.,-]+))?", lora.strip())
    if match is None or not int(match[1]):
        raise ValueError(
            f"plan(lora): a rank and the linear layers that get adapters, as in r=8,targets=q_proj,v_proj, or "
            f"r=8,targets=all-linear; got {lora!r}."
        )
    targets = tuple(filter(None, (match[2] or "all-linear").split(",")))
    return Finetuning(other_parts=parts, lora=int(match[1]), targets=targets, frozen_dtype=frozen_dtype)


def _question(
    model: str, convention: str, *, gpus: tuple[str, ...], schemes: tuple[str, ...], sweep: bool, memory: str | None,
    card: str | None, seq: int | None, bucket: str | None, efficiency: float | None, peak: float | None,
    bandwidth: int | None, node_bandwidth: int | None, latency: float | None, node_latency: float | None,
    node_size: int | None, reserve: str | None, offload: str | None,
    host_memory: str | None, placement: str, lora: str | None, other_parts: str, frozen_dtype: str | None,
    bucket_elements: int | None, **options: Any,
) -> Question:  # fmt: skip
    """What was typed as a question. ValueError, with what would work, if it is none."""
    from zerosim.planner import cards, conventions, question
    from zerosim.records.question import Network, Question

    rules = conventions.convention(convention)
    asked = question.gpus(gpus)
    preset = cards.card(card) if card is not None else None
    nbytes = preset.memory if preset is not None else None
    if memory is not None:
        nbytes = _memory(memory)
    if options["largest_model"] and nbytes is None:
        raise ValueError("plan(largest_model): what a card holds is needed, as in --memory 80GB or --card H100.")
    return question.check(
        Question(
            model=model,
            asked=asked,
            gpus=question.around(asked[0]) if sweep and len(asked) == 1 else asked,
            rows=question.offloaded(question.rows(schemes) or rules.rows(options["precision"]), offload),
            host_memory=None if host_memory is None else _memory(host_memory, "host_memory"),
            placement="round robin" if placement == "round-robin" else "nodes",
            convention=convention,
            memory=nbytes,
            reserve=question.reserve(reserve, nbytes),
            others=() if schemes or offload else rules.others,
            card=None if preset is None else preset.name,
            binary=memory is not None and "i" in memory.lower(),
            sequence=seq,
            bucket=bucket_elements
            if bucket is None
            else question.bucket(bucket, options["precision"] or rules.precision),
            finetuning=_finetuning(lora, other_parts, frozen_dtype),
            network=Network(
                efficiency=efficiency,
                peak=None if peak is None else peak * 1e12,
                within=bandwidth,
                between=node_bandwidth,
                hop_within=None if latency is None else latency * 1e-6,
                hop_between=None if node_latency is None else node_latency * 1e-6,
                node=node_size,
            ),
            **options,
        )
    )


def _memory(text: str, option: str = "memory") -> int:
    try:
        return sizes.parse(text)
    except ValueError as error:
        raise ValueError(f"plan({option}): {error}") from error


def _targets(json_to: str | None, outputs: tuple[Path, ...]) -> dict[Path, str]:
    """The files that were asked for, by what they are. ValueError, before anything is run, if one can't be written."""
    from zerosim.api import plan_files

    named = [] if json_to is None or json_to == "-" else [(Path(json_to), ".json")]
    named += [(path, plan_files.form(path, "plan(out)")) for path in outputs]
    places: set[Path] = set()
    for path, _ in named:
        if path.resolve() in places:
            raise ValueError(f"plan(FILE): {path} is named for two things. Name another file for one.")
        places.add(path.resolve())
        folder = path.resolve().parent
        if path.is_dir() or not folder.is_dir() or not os.access(folder, os.W_OK):
            reason = f"the folder {folder} " + ("does not exist" if not folder.is_dir() else "cannot be written to")
            if path.is_dir():
                reason = "it is a folder"
            raise ValueError(f"plan(FILE): {path} cannot be written: {reason}. Name another file.")
        if path.exists() and not path.is_file():  # a file would take the place of the device or the pipe
            raise ValueError(f"plan(FILE): {path} is no file. Name another, or print the plan with --json -.")
    return dict(named)


def _write(targets: dict[Path, str], source: ModelSource, plan: Plan) -> dict[Path, str]:
    """Make all files, then write them; what each holds, in words."""
    from zerosim.api import plan_files
    from zerosim.records.files import write_whole

    made = {}
    for path, ending in targets.items():
        with _progress(f"making {path.name}") as advance, _importable():
            made[path] = plan_files.content(path, ending, source, plan, advance)
    for path, (content, _) in made.items():
        try:
            write_whole(path.resolve(), content)  # of a link, what it leads to
        except OSError as error:
            raise Refused(f"plan(FILE): {path} cannot be written: {error.strerror}. Name another file.") from error
    return {path: what for path, (_, what) in made.items()}


def _run(question: Question) -> tuple[ModelSource, Plan]:
    """The model and its plan."""
    from zerosim.planner import largest_model, models
    from zerosim.planner import plan as plans

    with _progress("reading the model") as advance, _importable():
        source = models.read(question.model, question.finetuning)
        total = plans.work(question) + largest_model.work(question)
        found = plans.make(source, question, lambda doing: advance(doing, total))
        if question.largest_model:
            found = largest_model.added(found, lambda doing: advance(doing, total))
        return source, found


@contextlib.contextmanager
def _progress(doing: str) -> Iterator[Callable[[str, int | None], None]]:
    """How far it is, on standard error, and what to call with what has been done, and of how many in all."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    if not console.is_terminal:
        with _lines(doing) as advance, _output_kept_clean():
            yield advance
        return
    columns = TextColumn("{task.description:<44}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=console, transient=True) as progress, _output_kept_clean():
        bar = progress.add_task(doing, total=None)

        def show(doing: str, total: int | None) -> None:
            progress.update(bar, advance=total is not None, total=total, description=doing)

        yield show


@contextlib.contextmanager
def _lines(doing: str) -> Iterator[Callable[[str, int | None], None]]:
    """The same as lines, one every ``TOLD_EVERY`` seconds, so that what takes long is seen to be at work."""
    at, ended, began = doing, threading.Event(), time.monotonic()

    def advance(doing: str, total: int | None) -> None:
        nonlocal at
        at = doing

    def tell() -> None:
        with contextlib.suppress(OSError, ValueError):  # nobody reads them any more
            while not ended.wait(TOLD_EVERY):
                click.echo(f"working for {time.monotonic() - began:.0f} s: {at}", err=True)

    teller = threading.Thread(target=tell, daemon=True)
    teller.start()
    try:
        yield advance
    finally:
        ended.set()
        teller.join()


@contextlib.contextmanager
def _output_kept_clean() -> Iterator[None]:
    """Standard output is the plan's: what a model's own code prints, or writes to descriptor 1, goes to the errors."""
    if (out := sys.stdout) is None:  # it is closed, and nothing can be printed to it
        yield
        return
    out.flush()
    with contextlib.ExitStack() as undone:
        with contextlib.suppress(OSError):  # as where the errors are closed
            kept = os.dup(1)
            undone.callback(os.close, kept)
            os.dup2(2, 1)
            undone.callback(os.dup2, kept, 1)
        undone.callback(out.flush)  # what was written to it under another name goes with the rest
        undone.enter_context(contextlib.redirect_stdout(sys.stderr))
        yield


@contextlib.contextmanager
def _importable() -> Iterator[None]:
    """A Python path may be a file of the folder that one is in, as for ``python -m``."""
    sys.path.insert(0, str(Path.cwd()))
    try:
        yield
    finally:
        with contextlib.suppress(ValueError):
            sys.path.remove(str(Path.cwd()))
