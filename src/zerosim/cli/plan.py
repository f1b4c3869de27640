"""``zerosim plan``: parse, call, print.

Exit codes: 0 the plan was made; 2 what was asked for cannot be planned; 130 interrupted. Heavy
imports wait until it runs.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from zerosim.bands import WIRES
from zerosim.cli.errors import Refused, errors_for_people, printing
from zerosim.util import sizes

if TYPE_CHECKING:
    from zerosim.records.plan import Finetuning, Plan, Question

FAMILIES = ("mlp", "gpt", "llama")
PRECISIONS = (
    "mixed", "bf16", "fp32", "bf16-fp32-grads", "mixed-main-grads", "fsdp", "pure-bf16", "bf16-moments", "bf16-master",
    "autocast",
)  # fmt: skip
FROZEN = ("fp32", "fp16", "bf16", "nf4", "nf4-double")
NOT_PLANNED = {"tp": "tensor", "pp": "pipeline", "cp": "context", "ep": "expert"}
CHARTS = (".png", ".svg", ".html")


class Rate(click.ParamType[int]):
    """A number of bytes per second with its unit, as in 450GB/s."""

    name = "rate"

    def convert(self, value: str | int, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, int):
            return value
        try:
            rate = value.strip().removesuffix("/s")
            if rate.endswith("b"):  # networks are sold in bits, and an eighth of what was meant is no bound
                raise ValueError(f"{value!r} may mean bits, of which a byte has eight. Give bytes, as in 50GB/s.")
            return sizes.parse(rate)
        except ValueError as error:
            self.fail(str(error), param, ctx)


@click.command()
@click.argument("model", metavar="MODEL")
@click.option(
    "--gpus", multiple=True, metavar="N",
    help="Ranks: a number, 4,8,16, or 2-64 (powers of two).",
)  # fmt: skip
@click.option("--sweep", is_flag=True, help="Also show the powers of two around a single N.")
@click.option(
    "--memory", default=None, metavar="SIZE",
    help="Memory of one card, with its unit: 80GB is 80e9 bytes, 80GiB 80 × 2^30.",
)  # fmt: skip
@click.option("--card", default=None, metavar="NAME", help="A common card: its memory and speeds, as in H100.")
@click.option(
    "--scheme", "--stage", "schemes", multiple=True, metavar="NAME",
    help="ddp, zero1, zero2 or zero3 (or 0 to 3); several with commas.  [default: all that the convention has]",
)  # fmt: skip
@click.option(
    "--convention", default=None, metavar="NAME",
    help="Whose bands and rules: zero (the paper), deepspeed, fsdp2 or megatron. Shows other estimators beside.  "
    "[default: zero]",
)  # fmt: skip
@click.option(
    "--precision",
    type=click.Choice(PRECISIONS),
    default=None,
    help="Recipe of bands.  [default: the convention's]",
)
@click.option(
    "--wire", type=click.Choice(list(WIRES)), default=None, help="What travels as.  [default: the convention's]"
)
@click.option(
    "--wire-params",
    type=click.Choice(list(WIRES)),
    default=None,
    help="What parameters travel as, if as something else.",
)
@click.option(
    "--micro-batch", type=click.IntRange(min=1), default=1, show_default=True, help="Rows per rank at a time."
)
@click.option(
    "--seq", type=click.IntRange(min=1), default=None, help="Tokens in a row.  [default: the model's, up to 2048]"
)
@click.option(
    "--checkpoint", type=click.Choice(["none", "full", "selective"]), default="none", show_default=True,
    help="Activation checkpointing: full recomputes every unit; selective all but the matrix products.",
)  # fmt: skip
@click.option("--accumulate", type=click.IntRange(min=1), default=1, show_default=True, help="Micro-batches in a step.")
@click.option(
    "--sync", type=click.Choice(["each", "end"]), default=None,
    help="Reduce gradients after each micro-batch or at the end.  [default: each where they are sharded]",
)  # fmt: skip
@click.option(
    "--bucket", default=None, metavar="SIZE",
    help="What is gathered and reduced at a time: layer, model, or units up to a SIZE of gradients, as in 500MB.",
)  # fmt: skip
@click.option("--prefetch", type=click.IntRange(min=0), default=None, help="Units that ZeRO-3 gathers ahead.")
@click.option(
    "--optimizer",
    type=click.Choice(["adam", "adamw", "adam8bit", "sgd", "momentum"]),
    default="adam",
    show_default=True,
    help="What is kept; adam8bit: a byte for each moment, and an fp32 scale for each 256.",
)
@click.option(
    "--optimizer-in-backward", is_flag=True,
    help="Update each unit as soon as its gradients are there, and free them.",
)  # fmt: skip
@click.option(
    "--global-batch", type=click.IntRange(min=1), default=None,
    help="Rows of a step on all GPUs; how many micro-batches it takes follows.",
)  # fmt: skip
@click.option(
    "--loss", type=click.Choice(["fp32", "bf16", "chunked", "fused"]), default="fp32", show_default=True,
    help="Cross entropy: in fp32, in the logits' bf16, in fp32 by 8 chunks, or in one kernel that keeps nothing.",
)  # fmt: skip
@click.option(
    "--kv", type=click.Choice(["grouped", "expanded"]), default="grouped", show_default=True,
    help="Keys and values that heads share: kept once, or expanded to a copy for each head.",
)  # fmt: skip
@click.option(
    "--lora", default=None, metavar="r=8,targets=NAME,...",
    help="Train adapters of rank r beside these linear layers (or all-linear); all else is frozen.",
)  # fmt: skip
@click.option(
    "--other-parts", type=click.Choice(["frozen", "left-out", "trained"]), default="frozen", show_default=True,
    help="Of a model of several kinds of input, what text does not reach.",
)  # fmt: skip
@click.option(
    "--frozen-dtype", type=click.Choice(FROZEN), default=None,
    help="What is frozen is kept in this: 16 bits, or its blocks' matrices in 4.  [default: as what is trained]",
)  # fmt: skip
@click.option(
    "--config", "job", type=click.Path(dir_okay=False, path_type=Path), default=None, metavar="FILE",
    help="A job's ds_config.json or accelerate YAML: what it says, unless an option says otherwise.",
)  # fmt: skip
@click.option("--tp", "--tensor-parallel", type=int, default=1, hidden=True)
@click.option("--pp", "--pipeline-parallel", type=int, default=1, hidden=True)
@click.option("--cp", "--context-parallel", type=int, default=1, hidden=True)
@click.option("--ep", "--expert-parallel", type=int, default=1, hidden=True)
@click.option("--nvme", "--nvme-path", default=None, hidden=True)
@click.option(
    "--efficiency", type=click.FloatRange(0, 1, min_open=True), default=None,
    help="For the time's bound: the part of the peak that is reached.  [default: 0.5]",
)  # fmt: skip
@click.option("--peak", type=click.FloatRange(0, min_open=True), default=None, help="Peak of a card, in TFLOP/s.")
@click.option(
    "--bandwidth", type=Rate(), default=None, metavar="RATE", help="Of a card within its node, one way, as in 450GB/s."
)
@click.option(
    "--node-bandwidth", type=Rate(), default=None, metavar="RATE", help="Of a whole node to the others, one way."
)
@click.option("--latency", type=click.FloatRange(0, min_open=True), default=None, help="Of a hop within a node, in µs.")
@click.option(
    "--node-latency", type=click.FloatRange(0, min_open=True), default=None, help="Of a hop between nodes, in µs."
)
@click.option("--node-size", type=click.IntRange(min=1), default=None, help="Cards in a node.")
@click.option(
    "--largest-model", type=click.Choice(FAMILIES), default=None,
    help="Also find the largest model of this family that fits under each scheme on N such cards.",
)  # fmt: skip
@click.option(
    "--json", "json_to", default=None, metavar="FILE",
    help="Write the plan as JSON to FILE; with - print it instead of the tables.",
)  # fmt: skip
@click.option(
    "--chart", type=click.Path(dir_okay=False, path_type=Path), default=None, metavar="FILE",
    help="Draw the peaks by band to FILE: .png, .svg or .html.",
)  # fmt: skip
@click.option("-v", "--verbose", is_flag=True, help="Also the bands, the collectives, the peak and the least time.")
@click.pass_context
def plan(
    context: click.Context, /, model: str, json_to: str | None, chart: Path | None, verbose: bool, **options: Any
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
        convention = options.pop("convention")
        question = _question(model, convention or "zero", **options)
        targets = _targets(json_to, chart)
        found = _run(question)
        contents = {path: make(found) for path, make in targets.items()}
        _write(contents)
    with printing():
        if json_to == "-":
            from zerosim.records.plan import encode

            click.echo(encode(found), nl=False)
        else:
            from zerosim.report import plan_console as console

            console.show(found, verbose=verbose, estimates=convention is not None)
            for path in targets:
                click.echo(f"written to {path}")


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
    from zerosim.records.plan import Finetuning

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
    node_size: int | None, lora: str | None, other_parts: str, frozen_dtype: str | None,
    bucket_elements: int | None, **options: Any,
) -> Question:  # fmt: skip
    """What was typed as a question. ValueError, with what would work, if it is none."""
    from zerosim.planner import cards, conventions, question
    from zerosim.records.plan import Network, Question

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
            rows=question.rows(schemes) or list(rules.rows(options["precision"])),
            convention=convention,
            memory=nbytes,
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


def _memory(text: str) -> int:
    try:
        return sizes.parse(text)
    except ValueError as error:
        raise ValueError(f"plan(memory): {error}") from error


def _targets(json_to: str | None, chart: Path | None) -> dict[Path, Callable[[Plan], bytes]]:
    """The files that were asked for, and how each is made. Refused, before anything is run, if one can't be written."""
    from zerosim.records import plan as records

    found: dict[Path, Callable[[Plan], bytes]] = {}
    if json_to is not None and json_to != "-":
        found[Path(json_to)] = records.encode
    if chart is not None:
        if chart.suffix.lower() not in CHARTS:
            raise ValueError(f"plan(chart): the file's name ends in {', '.join(CHARTS)}; got {str(chart)!r}.")
        from zerosim.report import plan_chart as charts

        found[chart] = lambda plan: charts.drawn(plan, chart.suffix.lower()[1:])
    if json_to is not None and chart is not None and Path(json_to).resolve() == chart.resolve():
        raise ValueError(f"plan(FILE): {chart} is named for the plan and for its chart. Name another file for one.")
    for path in found:
        folder = path.resolve().parent
        if path.is_dir() or not os.access(folder, os.W_OK):
            reason = "is a folder" if path.is_dir() else f"cannot be written to {folder}"
            raise ValueError(f"plan(FILE): {path} {reason}. Name another file.")
        if path.exists() and not path.is_file():  # a file would take the place of the device or the pipe
            raise ValueError(f"plan(FILE): {path} is no file. Name another, or print the plan with --json -.")
    return found


def _write(contents: dict[Path, bytes]) -> None:
    from zerosim.records.files import write_whole

    for path, content in contents.items():
        try:
            write_whole(path.resolve(), content)  # of a link, what it leads to
        except OSError as error:
            raise Refused(f"plan(FILE): {path} cannot be written: {error.strerror}. Name another file.") from error


def _run(question: Question) -> Plan:
    """The plan, with a progress bar on standard error."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from zerosim.planner import largest_model, models
    from zerosim.planner import plan as plans

    columns = TextColumn("{task.description:<44}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    # Standard output is the plan's: what a model's own code prints goes with the progress.
    with (
        Progress(*columns, console=Console(stderr=True), transient=True) as progress,
        contextlib.redirect_stdout(sys.stderr),
    ):
        bar = progress.add_task("reading the model", total=plans.work(question) + largest_model.work(question))

        def advance(doing: str) -> None:
            progress.update(bar, advance=1, description=doing)

        with _importable():
            source = models.read(question.model, question.finetuning)
        found = plans.make(source, question, advance)
        return largest_model.added(found, advance) if question.largest_model else found


@contextlib.contextmanager
def _importable() -> Iterator[None]:
    """A Python path may be a file of the folder that one is in, as for ``python -m``."""
    sys.path.insert(0, str(Path.cwd()))
    try:
        yield
    finally:
        with contextlib.suppress(ValueError):
            sys.path.remove(str(Path.cwd()))
