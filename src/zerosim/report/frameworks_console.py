"""The frameworks as tables in a terminal. Takes the record; computes nothing but sums, ratios and units."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from zerosim.bands import WIRES
from zerosim.records.frameworks import (
    BYTES,
    CHECKS,
    COMPARE_GRADIENTS,
    DECISIONS,
    ELSEWHERE,
    GRADIENTS,
    GRADS,
    MASTER,
    NORMS,
    PARAMS,
    RANKS,
    STATE,
    Family,
    Framework,
    Frameworks,
    RankSeen,
)
from zerosim.report.tables import number_table, screen, verdict

SHOWN, SHOWN_VERBOSE = 5, 20  # failures of a check
WIDTH = 80


def show(found: Frameworks, console: Console | None = None, *, verbose: bool = False) -> None:
    """Print the verdicts, what fails first, and a table of the frameworks; ``verbose`` for what is behind it."""
    console = screen(console, width=WIDTH)
    run = [row for row in found.rows if not row.skipped]
    console.print(
        f"\n[bold]The frameworks on {found.settings.ranks} real ranks[/], {found.steps} steps, gloo; "
        + ", ".join(f"{name} {found.versions[name]}" for name in ("torch", "deepspeed") if name in found.versions)
    )
    console.print()
    _verdicts(found, console, SHOWN_VERBOSE if verbose else SHOWN)
    if run and not verbose:
        console.print(_summary(run, found))
    for table in (_memory(run, found.n_params), _traffic(run, found), _agreed(run)) if verbose else ():
        if table.row_count:
            console.print()
            console.print(table)
    if verbose:
        console.print('\nWhat is behind "for" is the textbook\'s, where the framework leaves it.')
    for row in run if verbose else ():
        what = f"behaves like {row.scheme or 'no scheme'}"
        console.print(f"{row.name} {'; '.join([what, *row.departs])}.", markup=False)
    for why in dict.fromkeys(row.skipped for row in found.rows if row.skipped):
        names = "; ".join(row.name for row in found.rows if row.skipped == why)
        console.print(f"Not run ({why}): {names}.", markup=False)
    if not verbose:
        console.print("[dim]-v: memory by band, traffic, norms, and where each leaves its scheme[/]")


def _verdicts(found: Frameworks, console: Console, most: int) -> None:
    if found.ended:
        console.print(f"[bold red]✗ incomplete[/]: {escape(found.ended)}")
    failures = {check: [each for each in found.failures if each.check == check] for check in CHECKS}
    run = [row for row in found.rows if not row.skipped]
    compared = {
        GRADIENTS: [bool(row.gradients) for row in run if row.family in COMPARE_GRADIENTS],
        BYTES: [rank.moved is not None and bool(rank.kernel) for row in run for rank in row.ranks],
        RANKS: [bool(row.ranks) for row in run],
        NORMS: [bool(row.norms) for row in run if row.family in COMPARE_GRADIENTS],
        DECISIONS: [bool(row.decisions) for row in run if row.family == Family.FSDP],
    }
    for check in sorted(CHECKS, key=lambda check: not failures[check]):
        seen = compared[check]  # what was not compared in any row is not said to hold
        holds = not failures[check] if failures[check] or any(seen) else None
        console.print(verdict(check, holds, CHECKS[check], partly=bool(holds) and not all(seen)))
        for failure in failures[check][:most]:
            console.print(f"  {failure.found}", style="red", markup=False, soft_wrap=not console.is_terminal)
        if len(failures[check]) > most:
            console.print(f"  and {len(failures[check]) - most:,} more, in frameworks.json")


def _summary(rows: Iterable[Framework], found: Frameworks) -> Table:
    """A line for each framework: what it behaves like, holds and sends."""
    table = number_table(
        "", "framework", "behaves like", "held", "peak", "asked,\nin P", "moved,\nin P",
        caption="B per parameter on the fullest rank, as the update begins and at the peak. P: all parameters once, in "
        "the gradients' dtype, times (N-1)/N. Moved: what gloo makes of what the collectives ask for.",
        tight=True,
    )  # fmt: skip
    table.columns[1].justify, table.columns[1].no_wrap = "left", False
    for row in rows:
        held, peak = (max(sum(getattr(rank, which).values()) for rank in row.ranks) for which in ("held", "peak"))
        asked, moved = _in_p(row, found)
        table.add_row(
            _name(row),
            row.scheme or "no scheme",
            _per_param(held, found.n_params),
            f"{'' if all(rank.exact for rank in row.ranks) else '≤ '}{_per_param(peak, found.n_params)}",
            asked,
            moved,
        )
    return table


def _name(row: Framework) -> str:
    return row.name.replace(", ", ",\n").replace(" + ", " +\n")


def _busiest(row: Framework) -> RankSeen:
    return max(row.ranks, key=lambda rank: rank.moved or 0)


def _in_p(row: Framework, found: Frameworks) -> tuple[str, str]:
    """What the busiest rank's collectives ask for, and what gloo moves of it, in P."""
    size = found.settings.ranks
    unit = found.n_params * WIRES[row.wire].itemsize * (size - 1) / size
    asked, moved = _busiest(row).asked, _busiest(row).moved
    return f"{asked / unit:.2f}", "unknown" if moved is None else f"{moved / unit:.2f}"


def _memory(rows: Iterable[Framework], n_params: int) -> Table:
    table = number_table(
        "Bytes per parameter on the fullest rank, as the update begins",
        "framework", "params", "grads", "Adam", "elsewhere", "held", "rest", "peak", "in",
        caption="Adam: its state and master weights. Elsewhere: allocated, but in no tensor of a band. Rest: in all, "
        "between steps. Peak: the most within a step, activations too; ≤ where a block may have been "
        "freed before.",
        tight=True,
    )  # fmt: skip
    for row in rows:
        fullest = max(row.ranks, key=lambda rank: sum(rank.held.values())).held
        bands = fullest[PARAMS], fullest[GRADS], fullest[MASTER] + fullest[STATE], fullest[ELSEWHERE]
        held, rest = ([sum(getattr(rank, which).values()) for rank in row.ranks] for which in ("held", "rest"))
        highest = max(row.ranks, key=lambda rank: sum(rank.peak.values()))
        table.add_row(
            _name(row),
            *(_per_param(band, n_params) for band in bands),
            _range(held, n_params),
            _range(rest, n_params),
            f"{'' if highest.exact else '≤ '}{_per_param(sum(highest.peak.values()), n_params)}",
            highest.peak_phase,
        )
    return table


def _agreed(rows: Iterable[Framework]) -> Table:
    table = number_table(
        "What all ranks agree on before an update, beside the simulator's of the same gradients",
        "framework", "norm", "ulp", "ulp, inf", "skipped", "ours",
        caption="Norm: clip_grad_norm_'s of type 2 in the first step. Ulp: how far it is from ours, the most in any "
        "step, and of type inf. Skipped: the steps that GradScaler and ShardedGradScaler skip, where one element of "
        "one rank's shard overflows in the second.",
        tight=True,
    )  # fmt: skip
    for row in rows:
        if not row.norms:
            continue
        two, largest = ([norm for norm in row.norms if norm.kind == kind] for kind in ("2.0", "inf"))
        skipped = dict.fromkeys(str(each.step) for each in row.decisions if any(each.skipped))
        table.add_row(
            _name(row),
            f"{two[0].theirs:.7g}",
            f"{max(norm.ulps for norm in two)}",
            f"{max(norm.ulps for norm in largest)}" if largest else "–",
            ", ".join(skipped) or "–",
            ", ".join(dict.fromkeys(str(each.step) for each in row.decisions if each.ours_skipped)) or "–",
        )
    return table


def _per_param(nbytes: int, n_params: int) -> str:
    """Bytes per parameter, to two digits, or to none where there are thousands."""
    return f"{nbytes / n_params:,.{2 if nbytes < 1000 * n_params else 0}f}"


def _range(counts: Sequence[int], n_params: int) -> str:
    """Bytes per parameter on the ranks: one number where they agree."""
    low, high = (_per_param(count, n_params) for count in (min(counts), max(counts)))
    return low if low == high else f"{low}–{high}"


def _traffic(rows: Iterable[Framework], found: Frameworks) -> Table:
    table = number_table(
        "Bytes that the busiest rank sends in a step, and bits",
        "framework", "asked, P", "moved, P", "framing", "kernel", "gradients", "parameters", "largest",
        caption="P: all parameters once, in the dtype of the gradients that travel, times (N-1)/N. Asked: what a "
        "ring must send for the collectives. Moved: what gloo makes of them. Gradients: elements that differ "
        "from the ring over the local ones. Parameters: that differ from the simulator's after the last step, by so "
        "much at most; in bf16 "
        "the frameworks compute in it too, and the simulator in fp32.",
        tight=True,
    )  # fmt: skip
    for row in rows:
        busiest = _busiest(row)
        counted = busiest.kernel.get("sockets") or busiest.kernel.get("process")
        gradients = f"{sum(step.differing for step in row.gradients):,}" if row.gradients else "–"
        table.add_row(
            _name(row),
            *_in_p(row, found),
            "unknown" if busiest.framing is None else f"{busiest.framing:,}",
            f"{counted[-1]:,}" if counted else "not measured",
            gradients,
            f"{row.differing:,}",
            f"{row.largest:.1e}",
        )
    return table
