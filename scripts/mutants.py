"""Mutation testing: change the source in one place at a time, and see whether the tests notice.

Owns which tests are asked, and the run. ``mutants_made.py`` owns what is changed, ``mutants_page.py``
what becomes of the result. Which tests run a line is measured, by coverage.py.

    python scripts/mutants.py [--only PATTERN ...] [--sample N] [--seconds S] [--jobs N]

The tests are collected once. For each mutant a fork gives the function its changed code and runs the tests
that run what is changed, the quickest first, until one fails. What was found is kept in ``build/mutants``,
so that a run that was stopped goes on: what was noticed stays so, what survived is tried again when it would
be asked other tests. Remove the folder to begin anew.
"""

from __future__ import annotations

import argparse
import functools
import gc
import hashlib
import json
import os
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter, defaultdict
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from fnmatch import fnmatch
from itertools import chain, zip_longest
from pathlib import Path
from types import FunctionType
from typing import Any

import coverage
import pytest

import mutants_page
from mutants_made import Mutant, mutants

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src/zerosim"
STATE = ROOT / "build/mutants"
# What is changed: the core, its closed forms, what checks it, the lab, and what that writes, prints and ends with.
CHANGED = (
    *("[!_]*", "theory/[!_]*", "worlds/local", "worlds/dry", "util/casts", "checks/[!_]*", "lab/[!_]*"),
    *("records/results", "records/files", "records/settings", "records/consistency", "records/failures"),
    *("records/ablations", "report/tables", "report/lab_console", "cli/errors", "cli/main"),
)
# Which tests are asked: those that need no browser, no torch and no process of their own, and are quick.
ASKED = (
    *("test_*", "checks/test_*", "lab/test_*", "records/test_*", "kernels/test_*", "util/test_*", "worlds/test_*"),
    *("report/test_consoles", "report/test_tables", "report/test_lanes", "report/test_trace"),
    *("cli/test_main", "cli/test_errors", "cli/test_written", "api/test_compare"),
    "checkpoints/test_checkpoints",
)
NOT = ("test_house", "test_properties", "worlds/test_gloo", "worlds/test_torch_ring", "lab/test_load")
QUIETLY = ("-qs", "-pno:cacheprovider", "-pno:xdist", "-pno:hypothesispytest", "--assert=plain", "-Wignore")
ON_IMPORT = "on import"  # of what runs when no test does
Tests = dict[str, list[str]]  # by their file
Ran = dict[str, dict[int, set[str]]]  # for each file of the source and each of its lines, the tests that run it
SWITCHES = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MPLBACKEND": "Agg", "ZEROSIM_KERNELS": "numpy"}


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
        forget()
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


class Trials:
    """A plugin of pytest: of the tests that it has collected those are run that mutants are to be asked, in forks."""

    def __init__(
        self,
        asked: Sequence[tuple[Mutant, Tests]],
        seconds: Mapping[str, float],
        jobs: int,
        note: Callable[[Mutant, Tests, str], None],
    ) -> None:
        self.asked, self.seconds, self.jobs, self.note = asked, seconds, jobs, note

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        items = {item.nodeid: item for item in session.items}
        objects: dict[tuple[str, str], list[FunctionType]] = defaultdict(list)
        for each in gc.get_objects():
            if type(each) is FunctionType:
                objects[each.__code__.co_filename, each.__code__.co_qualname].append(each)
        noticing: dict[str, Counter[str]] = defaultdict(Counter)  # of each module, what noticed most is asked first

        def ask(mutant: Mutant, tests: Tests, files: Sequence[str]) -> int:
            forget()
            for function in objects[mutant.code.co_filename, mutant.function]:
                function.__code__ = mutant.code
            order = [items[test] for file in files for test in tests[file]]
            for item, following in zip(order, [*order[1:], None], strict=False):
                signal.setitimer(signal.ITIMER_REAL, 10 + 5 * self.seconds[item.nodeid])
                session.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
                if session.testsfailed:
                    return 1 + files.index(_file(item.nodeid))
            return 0

        def trials() -> Iterator[tuple[Any, int]]:
            for mutant, tests in self.asked:
                files = sorted(tests, key=lambda file: -noticing[mutant.module][file])
                yield (mutant, tests, files), forked(functools.partial(ask, mutant, tests, files))

        for (mutant, tests, files), code in ended(trials(), self.jobs):
            if code > 0:
                noticing[mutant.module][files[code - 1]] += 1
            self.note(mutant, tests, {0: "survived", -signal.SIGALRM: "timeout"}.get(code, "killed"))
        return True


def forget() -> None:
    """Empty every cache of a function's results."""
    for each in gc.get_objects():
        if type(each) is functools._lru_cache_wrapper:
            each.cache_clear()


def forked(run: Callable[[], int]) -> int:
    """Run in a fork, of which this is the process id; its exit code is what the function returns."""
    if child := os.fork():
        return child
    os.setpgid(0, 0)
    log = os.open(os.environ.get("MUTANTS_LOG", os.devnull), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    for stream in (1, 2):
        os.dup2(log, stream)
    code = 1
    try:
        code = run()
    except BaseException:  # noqa: BLE001 - whatever it is, it is noticed
        traceback.print_exc()
    sys.stdout.flush()
    os._exit(code)


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
    helpers = (*sorted((ROOT / "tests").rglob("[!t]*.py")), *(ROOT / "tests").glob("*/*.toml"))
    for path in (*sorted(SOURCE.rglob("*.py")), *helpers):
        shared.update(path.read_bytes())
    names = {file: hashlib.sha256(shared.digest() + file.read_bytes()).hexdigest() for file in files}
    kept = {file: STATE / f"{file.stem}-{name[:16]}" for file, name in names.items()}
    new = [file for file in files if not kept[file].with_suffix(".json").exists()]

    def measure(file: Path) -> int:
        return int(pytest.main([*QUIETLY, str(file)], plugins=[Watch(kept[file])]))

    for file, _ in ended(((file, forked(functools.partial(measure, file))) for file in new), jobs):
        count = len(json.loads(kept[file].with_suffix(".json").read_text())[0])
        print(f"{file.relative_to(ROOT)}: {count} tests that pass while they are measured", flush=True)
    seconds: dict[str, float] = {}
    ran: Ran = defaultdict(lambda: defaultdict(set))
    for path in kept.values():
        took, users = json.loads(path.with_suffix(".json").read_text())
        users[""] = [ON_IMPORT]
        seconds |= took
        data = coverage.CoverageData(str(path))
        data.read()
        for name in data.measured_files():
            for line, contexts in data.contexts_by_lineno(name).items():
                ran[name][line].update(*([each] if each in took else users.get(each, ()) for each in contexts))
    return seconds, ran


def asked(mutant: Mutant, seconds: Mapping[str, float], ran: Ran, enough: float) -> Tests:
    """The tests that run what is changed, by file, for so many seconds: the module's own, then the quickest.

    Of a test that is run with several parameters one comes after one of each other, then a second.
    """
    lines, files = ran[mutant.code.co_filename], defaultdict[str, list[str]](list)
    found = set[str]().union(*(lines.get(line, ()) for line in mutant.lines)) - {ON_IMPORT}
    own = f"test_{mutant.module.rpartition('.')[2]}.py"
    several = Counter[str]()
    order = []
    for test in sorted(found, key=lambda test: (seconds[test], test)):
        function = test.partition("[")[0]
        order.append((own not in test, several[function], seconds[test], test))
        several[function] += 1
    for *_, test in sorted(order):
        enough -= seconds[test]
        if enough >= 0:
            files[_file(test)].append(test)
    return dict(sorted(files.items(), key=lambda each: (own not in each[0], sum(map(seconds.__getitem__, each[1])))))


def _file(test: str) -> str:
    return test.partition("::")[0]


def _digest(*texts: str) -> str:
    return hashlib.sha256("\n".join(texts).encode()).hexdigest()[:16]


def modules(patterns: Sequence[str]) -> dict[str, Path]:
    """What is changed, by name, of which a pattern speaks."""
    paths = dict.fromkeys(path for each in CHANGED for path in sorted(SOURCE.glob(f"{each}.py")))
    names = {".".join(path.relative_to(SOURCE).with_suffix("").parts): path for path in paths}
    return {name: path for name, path in names.items() if any(fnmatch(name, pattern) for pattern in patterns)}


def main() -> None:
    """Parse, run, and record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=["*"], help="modules, such as 'checks.*'; default: all")
    parser.add_argument(
        "--sample", type=int, help="so many mutants of each module, drawn alike each time; default: all"
    )
    parser.add_argument("--seconds", type=float, default=60, help="of tests that one is asked; default: %(default)s")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="at a time; default: %(default)s")
    options = parser.parse_args()
    os.environ |= SWITCHES
    os.chdir(ROOT)
    sys.path[:0] = [str(ROOT / "src")]
    import jaxtyping
    import sklearn.datasets  # noqa: F401 - it cannot be loaded where there is no torch in this way

    jaxtyping.install_import_hook = lambda *_: None  # tests must notice, not it
    sys.modules["torch"] = None  # type: ignore[assignment] # what needs it is skipped
    STATE.mkdir(parents=True, exist_ok=True)
    files = dict.fromkeys(path for each in ASKED for path in sorted((ROOT / "tests").glob(f"{each}.py")))
    chosen = [file for file in files if not any(file.match(f"tests/{name}.py") for name in NOT)]
    seconds, ran = measured(chosen, options.jobs)
    made = {name: mutants(name, path, options.sample) for name, path in modules(options.only).items()}
    for name, (some, there) in made.items():  # what runs on import alone has run before a fork is there
        alone = {line for line, tests in ran[str(modules([name])[name])].items() if tests == {ON_IMPORT}}
        made[name] = [each for each in some if not alone.intersection(each.lines)], there
    log = STATE / "fates.jsonl"
    known = {each["key"]: each for each in map(json.loads, log.read_text().splitlines())} if log.exists() else {}
    left: list[tuple[Mutant, Tests]] = []
    for mutant in filter(None, chain(*zip_longest(*(some for some, _ in made.values())))):  # a few of all, then more
        tests = asked(mutant, seconds, ran, options.seconds)
        before = known.get(mutant.key, {"fate": "survived", "asked": ""})
        if before["fate"] == "survived" and before["asked"] != _digest(*sorted(chain(*tests.values()))):
            left.append((mutant, tests))
    print(f"{sum(len(some) for some, _ in made.values())} mutants, of which {len(left)} to be tried", flush=True)
    with log.open("a") as into, tempfile.TemporaryDirectory() as folder:

        def note(mutant: Mutant, tests: Tests, fate: str) -> None:
            known[mutant.key] = {"key": mutant.key, "asked": _digest(*sorted(chain(*tests.values()))), "fate": fate}
            print(json.dumps(known[mutant.key]), file=into, flush=True)
            if fate == "survived":
                print(f"survived: {mutant.module}: {mutant.change}", flush=True)

        os.environ["PYTEST_DEBUG_TEMPROOT"] = folder
        if left:
            pytest.main([*QUIETLY, *map(str, chosen)], plugins=[Trials(left, seconds, options.jobs, note)])
    found = {
        name: mutants_page.entry(there, [(each.change, known[each.key]["fate"]) for each in some], options.seconds)
        for name, (some, there) in made.items()
        if some
    }
    if said := mutants_page.keep(found):
        sys.exit("\n".join(["mutants.py:", *said]))


if __name__ == "__main__":
    main()
