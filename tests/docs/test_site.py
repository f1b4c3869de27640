"""The documentation site: what its own pages show is what comes out, and nothing leads nowhere."""

import doctest
import importlib
import io
import os
import re
import shlex
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import pytest
from rich.console import Console

import notebook_links
import record
from zerosim.cli import main as cli
from zerosim.records.results import Results
from zerosim.report import lab_console

pytestmark = pytest.mark.usefixtures("shapes_unchecked")

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = ["index.md", "tutorials.md", "plan.md", "conventions.md"]

mkdocs_needed = pytest.mark.skipif(find_spec("mkdocs") is None, reason="needs mkdocs: pip install 'zerosim[docs]'")


def text(page: str) -> str:
    return (DOCS / page).read_text(encoding="utf-8")


def ran(page: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The names that a page's one example leaves behind."""
    monkeypatch.chdir(folder)
    [example] = re.findall(r"```python\n(.*?)```", text(page), re.DOTALL)
    space: dict[str, Any] = {}
    exec(example, space)
    return space


def test_the_lab_prints_what_the_first_page_shows() -> None:
    """The screen is that of the recorded run, to the last character, in 80 columns."""
    found = record.load("lab")
    assert isinstance(found, Results)
    out = io.StringIO()
    lab_console.show(found, Path("out"), Console(file=out))
    [shown] = re.findall(r"```text\n(.*?)```", text("index.md"), re.DOTALL)
    assert shown.strip("\n").splitlines() == [line.rstrip() for line in out.getvalue().strip("\n").splitlines()]


def test_the_first_example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """It trains, says so, and leaves a picture."""
    run = ran("index.md", tmp_path, monkeypatch)["run"]
    assert run.name in capsys.readouterr().out
    assert (tmp_path / "step.png").stat().st_size > 10_000


def test_a_plan_without_extras(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The example holds, and data parallelism is what does not fit on that card."""
    plan = ran("plan.md", tmp_path, monkeypatch)["plan"]
    assert {cell.name for cell in plan.record.beside(8) if not cell.fits} == {"data parallel"}


def test_the_tutorial() -> None:
    """Every line gives what the page says that it does."""
    failed, tried = doctest.testfile(str(DOCS / "tutorials.md"), module_relative=False, optionflags=doctest.ELLIPSIS)
    assert (failed, tried) == (0, 19)


@pytest.mark.parametrize("page", PAGES)
def test_commands_are_commands(page: str) -> None:
    """What is typed in a shell is taken, with all its options."""
    lines = [line for block in re.findall(r"```sh\n(.*?)```", text(page), re.DOTALL) for line in block.splitlines()]
    for line in lines:
        program, *arguments = shlex.split(line, comments=True)
        if program == "pip":
            assert re.fullmatch(r"install \.(\[[a-z]+\])?", " ".join(arguments)), line
            continue
        assert program == "zerosim", line
        name, *options = arguments
        command = cli.main.get_command(click.Context(cli.main), name)
        assert command is not None, line
        command.make_context(name, options)


def test_options_that_the_plans_page_names_are_options() -> None:
    """Each is one of the command's, with a value that it takes."""
    command = cli.main.commands["plan"]
    named: list[str] = re.findall(r"`(--[^`]*)`", text("plan.md"))
    assert len(named) > 12
    for each in named:
        option, *value = shlex.split(each)
        assert any(option in param.opts for param in command.params), option
        if value:
            command.make_context("plan", ["64,64", "--gpus", "8", option, *value])


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_to_files_of_the_checkout(page: str) -> None:
    """Pages can be read where they lie, too."""
    for link in re.findall(r"\]\((?!https:)([^)#]+)", text(page)):
        assert (DOCS / link).is_file(), link


def test_what_is_installed_is_the_checkout() -> None:
    """No page asks for a package by a name that nobody has published it under."""
    pages = {path.name: path.read_text(encoding="utf-8") for path in [*DOCS.glob("*.md"), ROOT / "README.md"]}
    assert [name for name, page in pages.items() if re.search(r"pip install '?zerosim", page)] == []


def test_every_page_that_the_site_lists_is_there() -> None:
    """In docs/, or among those that are added."""
    listed = re.findall(r"[ :-] (\S+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    added = set(re.findall(r'"(\w+\.md)": "', (ROOT / "scripts" / "docs_site.py").read_text())) | {"api.md"}
    assert len(listed) > 10
    assert [name for name in listed if name not in added and not (DOCS / name).is_file()] == []


@mkdocs_needed
def test_pages_say_where_notebooks_open(monkeypatch: pytest.MonkeyPatch) -> None:
    """As soon as the repository's address is known, a page of the site has it after each link to a notebook."""
    docs_site = importlib.import_module("docs_site")
    page = SimpleNamespace(file=SimpleNamespace(src_uri="tutorials.md"))
    for address, count in ((None, 0), ("https://github.com/owner/name", 2)):
        monkeypatch.setattr(notebook_links, "address", lambda known=address: known)
        shown = docs_site.on_page_markdown(text("tutorials.md"), page=page)
        assert shown.count(".ipynb) ([Colab](https://colab.research.google.com/github/owner/name/") == count


@mkdocs_needed
def test_the_site_is_built_without_a_warning(tmp_path: Path) -> None:
    """Strictly; every public name has its place, doctests are code, and links between pages lead to pages."""
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, "WARNING" in done.stderr) == (0, False), done.stderr
    api = (tmp_path / "api" / "index.html").read_text(encoding="utf-8")
    for name in ("zerosim.schemes.Scheme", "zerosim.api.compare.compare", "zerosim.conformance.check.check"):
        assert f'id="{name}"' in api
    assert "<blockquote>" not in api
    assert 'href="../notebook.ipynb"' in (tmp_path / "argument" / "index.html").read_text(encoding="utf-8")
    assert "Megatron" in (tmp_path / "conventions" / "index.html").read_text(encoding="utf-8")
