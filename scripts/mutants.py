"""Mutation testing: change the source in one place at a time, and see whether the tests notice.

Owns which tests are asked, and the run. ``mutants_made.py`` owns what is changed, ``mutants_page.py``
what becomes of the result. Which tests run a line is measured, by coverage.py.

    python scripts/mutants.py [--only PATTERN ...] [--sample N] [--seconds S] [--jobs N]

Each mutant is imported in a fork of this process, which has loaded everything but zerosim and the tests. It
runs the tests that run what is changed, the quickest first, until one fails. What was found is kept in
``build/mutants``, so that a run that was stopped goes on: what was noticed stays so, what survived is tried
again when it would be asked other tests. Remove the folder to begin anew.
"""

from __future__ import annotations

import argparse
import functools
import gc
import hashlib
import importlib
import json
import os
import resource
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter, defaultdict
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from fnmatch import fnmatch
from importlib.machinery import SourceFileLoader
from itertools import chain
from pathlib import Path
from types import CodeType
from typing import Any

import coverage
import pytest

import mutants_page
from mutants_made import Mutant, mutants

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src/zerosim"
STATE = ROOT / "build/mutants"
# What is changed: the core, its closed forms, what checks it, the lab, and what that writes, prints and ends with.
CHANGED = (
    *("[!_]*", "theory/[!_]*", "worlds/local", "worlds/dry", "util/casts", "checks/[!_]*", "lab/[!_]*"),
    *("records/results", "records/files", "records/settings", "records/consistency", "records/failures"),
    *("records/ablations", "records/loops", "report/tables", "report/*_console", "cli/errors", "cli/lab", "cli/main"),
)
# Which tests are asked: those that need no browser, no torch and no process of their own.
ASKED = (
    *("test_*", "checks/test_*", "lab/test_*", "records/test_*", "kernels/test_*", "util/test_*", "worlds/test_*"),
    *("report/test_consoles", "report/test_tables", "report/test_lanes", "report/test_trace"),
    *("cli/test_main", "cli/test_lab", "cli/test_written", "api/test_compare", "checkpoints/test_checkpoints"),
)
NOT = ("test_house", "test_interrupts", "test_public", "worlds/test_gloo", "worlds/test_torch_ring", "lab/test_load")
LOADED = (
    *("hypothesis.strategies", "jaxtyping", "ml_dtypes", "msgspec", "numpy.testing", "psutil", "safetensors.numpy"),
    *("sklearn.datasets", "rich.console", "rich.table", "rich.markup", "click.testing", "numba"),
)
QUIETLY = ("-q", "-pno:cacheprovider", "-pno:xdist", "-pno:hypothesispytest", "--assert=plain", "-Wignore")
MEMORY = 16 << 30  # bytes of address space

Codes = dict[str, CodeType]
Ran = dict[str, dict[int, set[str]]]  # for each file and each of its lines, the tests that run it


class Hurry:
    """A plugin of pytest: no test may take much longer than it did when nothing was changed."""

    def __init__(self, seconds: Mapping[str, float]) -> None:
        self.seconds = seconds

    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        signal.setitimer(signal.ITIMER_REAL, 10 + 5 * self.seconds[item.nodeid])


class Watch:
    """A plugin of pytest: what each test and each shared fixture runs, as if nothing were cached, and for how long."""

    def __init__(self, into: Path) -> None:
        self.into = into
        self.coverage = coverage.Coverage(data_file=str(into), include=[f"{SOURCE}/*"], config_file=False)
        self.seconds: dict[str, float] = {}
        self.users: dict[str, list[str]] = defaultdict(list)  # of a fixture, the tests
        self.test, self.failed = "", set[str]()
        self.coverage.start()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Function) -> Generator[None, Any, Any]:
        for each in gc.get_objects():
            if type(each) is functools._lru_cache_wrapper:
                each.cache_clear()
        self.test, started = item.nodeid, time.perf_counter()
        self.coverage.switch_context(self.test)
        done = yield
        self.coverage.switch_context("")
        if item.nodeid not in self.failed:
            self.seconds[item.nodeid] = round(time.perf_counter() - started, 3)
            for name in item.fixturenames:
                self.users[name].append(item.nodeid)
        return done

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: Any) -> Generator[None, Any, Any]:
        if fixturedef.scope != "function":
            self.coverage.switch_context(fixturedef.argname)
        made = yield
        self.coverage.switch_context(self.test)
        return made

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.failed |= {report.nodeid} if report.failed else set()

    def pytest_sessionfinish(self) -> None:
        self.coverage.stop()
        self.coverage.save()
        self.into.with_suffix(".json").write_text(json.dumps([self.seconds, self.users]))


def load_everything_else() -> Codes:
    """Load what a fork would else load or compile: the code of the source and of the tests, by file, not run yet."""
    os.environ |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MPLBACKEND": "Agg", "ZEROSIM_KERNELS": "numpy"}
    sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests")]
    for name in LOADED:
        importlib.import_module(name)
    sys.modules["torch"] = None  # type: ignore[assignment] # what needs it is skipped
    sys.modules["jaxtyping"].install_import_hook = lambda *_: None  # type: ignore[attr-defined] # tests must notice
    paths = [path for folder in ("src", "tests") for path in (ROOT / folder).rglob("*.py")]
    codes = {str(path): compile(path.read_bytes(), path, "exec", dont_inherit=True) for path in paths}
    from_file = SourceFileLoader.get_code

    def get_code(loader: SourceFileLoader, name: str) -> CodeType | None:
        return codes.get(loader.path) or from_file(loader, name)

    SourceFileLoader.get_code = get_code  # type: ignore[assignment, method-assign]
    gc.freeze()
    return codes


def tested(tests: Iterable[Sequence[str]], plugin: Callable[[], object]) -> int:
    """Run tests, some at a time, in a fork, of which this is the process id. Its exit code says which failed, if any."""
    if child := os.fork():
        return child
    os.setpgid(0, 0)
    log = os.open(os.environ.get("MUTANTS_LOG", os.devnull), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    for stream in (1, 2):
        os.dup2(log, stream)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    number = 0
    try:
        with tempfile.TemporaryDirectory() as folder:
            watching = plugin()
            for number, some in enumerate(tests, start=1):
                if pytest.main([*QUIETLY, f"--basetemp={folder}/{number}", *some], plugins=[watching]):
                    break
            else:
                number = 0
    except BaseException:  # noqa: BLE001 - whatever it is, it is noticed
        traceback.print_exc()
        number = 1
    sys.stdout.flush()
    os._exit(number)


def ended(tasks: Iterable[tuple[Any, int]], jobs: int) -> Iterator[tuple[Any, int]]:
    """The exit codes of forks, as they end, of which so many run at a time."""
    running: dict[int, Any] = {}

    def end() -> tuple[Any, int]:
        child, status = os.wait()
        with suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)  # what it has started
        return running.pop(child), os.waitstatus_to_exitcode(status)

    for task, child in tasks:
        running[child] = task
        if len(running) == jobs:
            yield end()
    while running:
        yield end()


def measured(files: Sequence[Path], jobs: int) -> tuple[dict[str, float], Ran]:
    """The seconds of each test, and what it runs; for a file of tests that was measured before, from what was kept."""
    shared = hashlib.sha256()
    for path in (
        *sorted(SOURCE.rglob("*.py")),
        *sorted((ROOT / "tests").rglob("[!t]*.py")),
        *(ROOT / "tests").glob("*/*.toml"),
    ):
        shared.update(path.read_bytes())
    kept = {
        file: STATE / f"{file.stem}-{hashlib.sha256(shared.digest() + file.read_bytes()).hexdigest()[:16]}"
        for file in files
    }
    new = [file for file in files if not kept[file].with_suffix(".json").exists()]
    for file, _ in ended(((file, tested([[str(file)]], functools.partial(Watch, kept[file]))) for file in new), jobs):
        count = len(json.loads(kept[file].with_suffix(".json").read_text())[0])
        print(f"{file.relative_to(ROOT)}: {count} tests that pass while they are measured", flush=True)
    seconds: dict[str, float] = {}
    ran: Ran = defaultdict(lambda: defaultdict(set))
    for path in kept.values():
        took, users = json.loads(path.with_suffix(".json").read_text())
        seconds |= took
        data = coverage.CoverageData(str(path))
        data.read()
        for name in data.measured_files():
            for line, contexts in data.contexts_by_lineno(name).items():
                ran[name][line].update(*([each] if each in took else users.get(each, ()) for each in contexts))
    return seconds, ran


def asked(mutant: Mutant, seconds: Mapping[str, float], ran: Ran, enough: float) -> dict[str, list[str]]:
    """The tests that run what is changed, or anything of its module if none does; the quickest, for so many seconds.

    They are by file, as each takes time to import; first those that are done soonest.
    """
    lines = ran[str(path_of(mutant.module))]
    found = set().union(*(lines.get(line, ()) for line in mutant.lines)) or set().union(*lines.values())
    files: dict[str, list[str]] = defaultdict(list)
    left = enough
    for test in sorted(found, key=lambda test: (seconds[test], test)):
        left -= seconds[test]
        if left >= 0:
            files[test.partition("::")[0]].append(test)
    return dict(sorted(files.items(), key=lambda each: sum(map(seconds.__getitem__, each[1]))))


def path_of(module: str) -> Path:
    """Where a module is."""
    return SOURCE / f"{module.replace('.', '/')}.py"


def modules(patterns: Sequence[str]) -> list[str]:
    """The names of what is changed, of which a pattern speaks."""
    paths = dict.fromkeys(path for each in CHANGED for path in sorted(SOURCE.glob(f"{each}.py")))
    names = [".".join(path.relative_to(SOURCE).with_suffix("").parts) for path in paths]
    return [name for name in names if any(fnmatch(name, pattern) for pattern in patterns)]


def main() -> None:
    """Parse, run, and record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=["*"], help="modules, such as 'checks.*'; default: all")
    parser.add_argument(
        "--sample", type=int, help="so many mutants of each module, drawn alike each time; default: all"
    )
    parser.add_argument("--seconds", type=float, default=30, help="of tests that one is asked; default: %(default)s")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="at a time; default: %(default)s")
    options = parser.parse_args()
    STATE.mkdir(parents=True, exist_ok=True)
    made = {name: mutants(name, path_of(name).read_text(), options.sample) for name in modules(options.only)}
    files = dict.fromkeys(path for each in ASKED for path in sorted((ROOT / "tests").glob(f"{each}.py")))
    codes = load_everything_else()
    os.chdir(ROOT)
    chosen = [file for file in files if not any(file.match(f"tests/{name}.py") for name in NOT)]
    seconds, ran = measured(chosen, options.jobs)
    log = STATE / "fates.jsonl"
    known = {each["key"]: each for each in map(json.loads, log.read_text().splitlines())} if log.exists() else {}
    left: list[tuple[Mutant, dict[str, list[str]], dict[str, str]]] = []
    for mutant in (each for some, _ in made.values() for each in some):
        tests = asked(mutant, seconds, ran, options.seconds)
        entry = {
            "key": digest(mutant.module, mutant.source),
            "asked": digest(*sorted(chain.from_iterable(tests.values()))),
        }
        before = known.get(entry["key"], {"fate": "survived", "asked": ""})
        if before["fate"] == "survived" and before["asked"] != entry["asked"]:
            left.append((mutant, tests, entry))
    print(f"{sum(len(some) for some, _ in made.values())} mutants, of which {len(left)} to be tried", flush=True)

    noticing: dict[str, Counter[str]] = defaultdict(
        Counter
    )  # of each module, the files that noticed most are asked first

    def trials() -> Iterator[tuple[Any, int]]:
        for mutant, tests, entry in left:
            files = sorted(tests, key=lambda file: -noticing[mutant.module][file])
            orders = [["-x", *tests[file]] for file in files]
            yield (mutant, files, entry), tested(orders, functools.partial(changed, mutant, codes, seconds))

    with log.open("a") as into:
        for number, ((mutant, files, entry), code) in enumerate(ended(trials(), options.jobs), start=1):
            entry["fate"] = {0: "survived", -signal.SIGALRM: "timeout"}.get(code, "killed")
            known[entry["key"]] = entry
            print(json.dumps(entry), file=into, flush=True)
            if code == 0:
                print(f"{number} of {len(left)} survived: {mutant.module}: {mutant.change}", flush=True)
            elif code > 0:
                noticing[mutant.module][files[code - 1]] += 1
    found = {
        name: mutants_page.entry(there, [(each.change, known[digest(name, each.source)]["fate"]) for each in some])
        for name, (some, there) in made.items()
    }
    if said := mutants_page.keep(found):
        sys.exit("\n".join(["mutants.py:", *said]))


def changed(mutant: Mutant, codes: Codes, seconds: Mapping[str, float]) -> Hurry:
    """In the fork: the change is what will be imported, within a minute or two."""
    signal.setitimer(signal.ITIMER_REAL, 120)
    path = str(path_of(mutant.module))
    codes[path] = compile(mutant.source, path, "exec", dont_inherit=True)
    return Hurry(seconds)


def digest(*texts: str) -> str:
    """A short name for texts."""
    return hashlib.sha256("\n".join(texts).encode()).hexdigest()[:16]


if __name__ == "__main__":
    main()
