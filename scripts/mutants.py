"""Mutation testing: change the source in one place at a time, and see whether the tests notice.

Owns which tests are asked, and the run. ``mutants_made.py`` owns what is changed, ``mutants_page.py``
what becomes of the result. The changes are mutmut's; its runner is not used, because it leaves out
whatever is decorated or outside of functions: context managers, properties, the tables of the closed
forms.

    python scripts/mutants.py [--jobs N] [--only MODULE ...] [--state FILE] [--budget SECONDS] [--out FILE]

Each mutant is the whole source with one change, imported by a process forked from one that has loaded
everything else. Results go to the state file as they come, so that a run that was stopped goes on; what
survived is tried again when a test has changed, what was noticed is not. Remove the file to begin anew.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mutants_made import Mutant

ROOT = Path(__file__).parents[1]
PACKAGE = Path("src/zerosim")
STEP = ("schemes", "options", "predictions", "memory", "traffic", "axes")  # what trains and counts
# For each module, a folder's with a dot, the tests that are asked, the quickest to notice first.
TESTS: dict[str, tuple[str, ...]] = {
    "comm": ("comm", *STEP),
    "worlds.local": ("comm", *STEP),
    "ranks": ("ranks", *STEP),
    "pool": ("pool", "ranks", *STEP),
    "counts": ("ledger", *STEP),
    "ledger": ("ledger", *STEP),
    "theory.forms": ("theory", "predictions", "memory", "traffic", "axes"),
    "theory.peaks": ("theory", "predictions", "memory", "axes"),
    "optimizer": ("optimizer", "options", "schemes"),
    "stages": ("schemes", "refusals", "options", "predictions"),
    "schemes": (*STEP, "refusals", "properties"),
    "buckets": STEP,
    "gradients": ("options", *STEP, "properties"),
    "parameters": ("options", *STEP, "properties"),
    "updates": ("options", *STEP, "properties"),
}
# Unless others are named.
MODULES = ["comm", "worlds.local", "ranks", "counts", "ledger", "theory.forms", "theory.peaks", "optimizer", "schemes"]
QUIETLY = ["-x", "-q", "-pno:cacheprovider", "-pno:xdist", "-Wignore::pytest.PytestAssertRewriteWarning"]
TIMEOUT = 900  # seconds for the tests without a change; with one they may take five times as long as without
MEMORY = 8 << 30  # bytes of address space


def asked(module: str, root: Path) -> list[str]:
    """The files of tests that are asked, those that there are."""
    names = dict.fromkeys(f"tests/test_{name}.py" for name in TESTS[module])
    return [name for name in names if (root / name).exists()]


def path_of(module: str) -> Path:
    """Where a module is in the tree."""
    return PACKAGE / f"{module.replace('.', '/')}.py"


def state_of(module: str) -> str:
    """A digest of all that a mutant's survival depends on besides itself. One that was noticed stays noticed."""
    digest = hashlib.sha256()
    shared = [ROOT / "tests/helpers.py", ROOT / "tests/conftest.py"]
    for path in [*sorted((ROOT / PACKAGE).rglob("*.py")), *(ROOT / name for name in asked(module, ROOT)), *shared]:
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def worker(folder: Path) -> None:
    """Try mutants, one JSON line each on standard input, and answer each with its fate on standard output."""
    _load_everything_else()
    os.chdir(folder)
    sys.path[:0] = [str(folder / "src"), str(folder / "scripts")]
    for line in sys.stdin:
        task = json.loads(line)
        path = folder / path_of(task["module"])
        original = path.read_text()
        path.write_text(task["source"])
        started = time.monotonic()
        fate = _fate(asked(task["module"], folder), task["limit"])
        path.write_text(original)
        print(json.dumps({"fate": fate, "seconds": round(time.monotonic() - started, 2)}), flush=True)


def _load_everything_else() -> None:
    """Whatever takes time to import, so that a forked child has only this package to load; and no shape checks."""
    import hypothesis.strategies  # noqa: F401
    import jaxtyping
    import ml_dtypes  # noqa: F401
    import msgspec  # noqa: F401
    import numpy as np
    import psutil  # noqa: F401
    import pytest  # noqa: F401

    np.ones(3) @ np.ones(3)
    jaxtyping.install_import_hook = lambda *_: None
    sys.dont_write_bytecode = True


def _fate(tests: Sequence[str], limit: float) -> str:
    """Run the tests in a fork: "killed", "survived", or, after so many seconds, "timeout"."""
    child = os.fork()
    if not child:
        _tested(tests)
    deadline = time.monotonic() + limit
    while time.monotonic() < deadline:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return "survived" if os.waitstatus_to_exitcode(status) == 0 else "killed"
        time.sleep(0.005)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return "timeout"


def _tested(tests: Sequence[str]) -> None:
    """In the child: run the tests until the first that fails; the exit code is pytest's. Never returns."""
    os.setpgid(0, 0)
    silence = os.open(os.environ.get("MUTANTS_LOG", os.devnull), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    for stream in (1, 2):
        os.dup2(silence, stream)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    try:
        import pytest

        code = int(pytest.main([*QUIETLY, *tests]))
    except BaseException:  # noqa: BLE001 - whatever it is, it is noticed
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    os._exit(code)


class Crew:
    """Workers, each with a copy of the tree of its own."""

    def __init__(self, jobs: int) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="mutants-")
        environment = os.environ | {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "MPLBACKEND": "Agg"}
        self.workers = []
        for number in range(jobs):
            folder = Path(self._folder.name) / str(number)
            for name in ("src", "tests", "scripts", "recorded", "docs", "benchmarks"):
                if (ROOT / name).exists():
                    shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
            for path in (*ROOT.glob("*.toml"), *ROOT.glob("*.md"), *ROOT.glob("Makefile")):
                shutil.copy(path, folder)
            paths = [str(folder / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
            environment = environment | {"PYTHONPATH": os.pathsep.join(paths)}
            command = [sys.executable, str(Path(__file__).resolve()), "--worker", str(folder)]
            self.workers.append(
                subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)
            )

    def __enter__(self) -> Crew:
        return self

    def __exit__(self, *_: object) -> None:
        for each in self.workers:
            each.kill()
            each.wait()
        self._folder.cleanup()

    def all(
        self, tasks: Sequence[Mutant], limits: Mapping[str, float], until: float
    ) -> Iterator[tuple[Mutant, dict[str, Any]]]:
        """The fate of each mutant, in no particular order; those that are not reached in time are left out."""
        import selectors

        waiting = [(task, limits.get(task.module, TIMEOUT)) for task in reversed(tasks)]
        busy: dict[int, Mutant] = {}
        with selectors.DefaultSelector() as ready:
            for each in self.workers:
                ready.register(each.stdout, selectors.EVENT_READ, each)  # type: ignore[arg-type]
                self._give(each, waiting, busy, until)
            while busy:
                for key, _ in ready.select():
                    answer = json.loads(key.data.stdout.readline())
                    yield busy.pop(key.data.pid), answer
                    self._give(key.data, waiting, busy, until)

    def _give(self, to: Any, waiting: list[tuple[Mutant, float]], busy: dict[int, Mutant], until: float) -> None:
        if waiting and time.monotonic() < until:
            task, limit = waiting.pop()
            busy[to.pid] = task
            to.stdin.write(json.dumps({"module": task.module, "source": task.source, "limit": limit}) + "\n")
            to.stdin.flush()


def main() -> None:
    """Parse, run, and record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--only", nargs="*", choices=TESTS, default=MODULES, help="default: %(default)s")
    parser.add_argument("--state", type=Path, default=ROOT / "build/mutants.jsonl", help="where results are kept")
    parser.add_argument("--budget", type=float, default=float("inf"), help="seconds after which no mutant is started")
    parser.add_argument("--out", type=Path, default=None, help="also write the record there")
    parser.add_argument("--sample", type=int, default=1, help="try every so many-th mutant only; nothing is recorded")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        worker(options.worker)
        return
    import mutants_page
    from mutants_made import Mutant

    until = time.monotonic() + options.budget
    sources = {name: path.read_text() for name in options.only if (path := ROOT / path_of(name)).exists()}
    states = {name: state_of(name) for name in sources}
    with ProcessPoolExecutor(min(options.jobs, len(sources))) as pool:
        tasks = [each for made in pool.map(_made, sources.items()) for each in made][:: options.sample]
    known = _known(options.state)
    fates = {}
    for each in tasks:
        fate, state = known.get(each.key, ("", ""))
        if fate and (fate != "survived" or state == states[each.module]):
            fates[each.key] = fate
    left = [each for each in tasks if each.key not in fates]
    print(f"{len(tasks)} mutants, of which {len(left)} to be tried, {options.jobs} at a time", flush=True)
    with Crew(options.jobs) as crew, options.state.open("a") as log:
        intact = [Mutant(name, "", 0, "", "", source) for name, source in sources.items()]
        limits: dict[str, float] = {}
        for each, answer in crew.all(intact if left else [], {}, until):
            limits[each.module] = 10 + 5 * answer["seconds"]
            print(f"{each.module}: {answer['seconds']} s for all its tests", flush=True)
            if answer["fate"] != "survived":
                sys.exit(f"mutants.py: the tests of {each.module} fail without any change; nothing was tried.")
        for number, (each, answer) in enumerate(crew.all(left, limits, until), start=1):
            fates[each.key] = answer["fate"]
            log.write(json.dumps({"key": each.key, "state": states[each.module], **answer}) + "\n")
            log.flush()
            if answer["fate"] == "survived":
                print(f"survived: {each.module}, line {each.line}: {mutants_page.change(asdict(each))}", flush=True)
            elif number % 100 == 0:
                print(f"{number} of {len(left)}", flush=True)
    record = mutants_page.record([(asdict(each), fates[each.key]) for each in tasks if each.key in fates])
    if options.out:
        options.out.write_text(json.dumps(record, indent=1) + "\n")
    if missing := len(tasks) - len(fates):
        sys.exit(f"mutants.py: {missing} mutants were not reached; run it again to go on.")
    sys.exit(mutants_page.judge(mutants_page.beside_others(record), keep=options.sample == 1))


def _made(module: tuple[str, str]) -> list[Mutant]:
    from mutants_made import mutants

    return mutants(*module)


def _known(state: Path) -> dict[str, tuple[str, str]]:
    """The fates in a state file, by mutant, each with the state of everything else when it was found."""
    state.parent.mkdir(parents=True, exist_ok=True)
    entries = map(json.loads, state.read_text().splitlines()) if state.exists() else ()
    return {entry["key"]: (entry["fate"], entry["state"]) for entry in entries}


if __name__ == "__main__":
    main()
