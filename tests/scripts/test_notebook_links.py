"""Where notebooks open: links that follow from the repository's address, and none where nobody knows it."""

import re
import tomllib
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

import notebook_links
import release
import write_readme

ROOT = Path(__file__).parents[2]
GITHUB, ELSEWHERE = "https://github.com/owner/name", "https://host.example/owner/name"
NOTEBOOKS = ("notebook.ipynb", "docs/write_zero.ipynb")


def test_the_address_is_that_of_the_project_urls(tmp_path: Path) -> None:
    """It is what a release has written to pyproject.toml, and nothing before."""
    project = tmp_path / "pyproject.toml"
    project.write_text('[project]\nname = "x"\n')
    assert notebook_links.address(tmp_path) is None
    project.write_text('[project]\nname = "x"\n\n' + release.urls(GITHUB))
    assert notebook_links.address(tmp_path) == GITHUB


@pytest.mark.parametrize("path", NOTEBOOKS)
def test_links_are_well_formed(path: str) -> None:
    """Each has the services' own form, names owner, repository, branch and a notebook that is there."""
    assert (ROOT / path).is_file()
    found = {service: urlsplit(link) for service, link in notebook_links.links(path, GITHUB, "v1.2.3").items()}
    assert (found["Colab"].netloc, found["Binder"].netloc) == ("colab.research.google.com", "mybinder.org")
    assert found["Colab"].path == f"/github/owner/name/blob/v1.2.3/{path}"
    assert found["Binder"].path == "/v2/gh/owner/name/v1.2.3"
    assert unquote(found["Binder"].query) == f"labpath={path}"
    assert all(link.scheme == "https" for link in found.values())


def test_colab_is_left_out_where_it_cannot_read() -> None:
    """It opens what is on GitHub; Binder takes the address of any repository, as one part of a path."""
    [(service, link)] = notebook_links.links("notebook.ipynb", ELSEWHERE).items()
    assert service == "Binder"
    assert [unquote(part) for part in urlsplit(link).path.split("/")[3:]] == [ELSEWHERE, "main"]


@pytest.mark.parametrize(("page", "count"), [("README.md", 2), ("docs/argument.md", 1), ("docs/tutorials.md", 2)])
def test_a_page_has_them_as_soon_as_the_address_is_known(page: str, count: int) -> None:
    """After each link to a notebook, once; without an address a page is as it was."""
    text = (ROOT / page).read_text(encoding="utf-8")
    assert notebook_links.linked(text, page, None) == text
    told = notebook_links.linked(text, page, GITHUB)
    assert notebook_links.linked(told, page, GITHUB) == told
    opened = re.findall(r"\.ipynb\) \(\[Colab\]\((\S+)\), \[Binder\]\(\S+\)\)", told)
    assert len(opened) == count
    assert {link.partition("/main/")[2] for link in opened} <= set(NOTEBOOKS)


def test_the_pages_are_written_with_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """The generator puts them where the address is, and leaves them out where it is not."""
    monkeypatch.setattr(notebook_links, "address", lambda: None)
    assert "colab" not in write_readme.written(write_readme.README)
    monkeypatch.setattr(notebook_links, "address", lambda: GITHUB)
    assert write_readme.written(write_readme.README).count("/github/owner/name/blob/main/") == len(NOTEBOOKS)


@pytest.mark.skipif(not (ROOT / ".binder").is_dir(), reason="no archive of the source has it, a checkout has")
def test_binder_installs_what_there_is() -> None:
    """This checkout, with extras that it has, and a Python that it runs on."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    lines = (ROOT / ".binder" / "requirements.txt").read_text(encoding="utf-8").splitlines()
    [wanted] = [line for line in lines if not line.startswith(("#", "--"))]
    match = re.fullmatch(r"\.\[([a-z,]+)\]", wanted)
    assert match
    assert set(match[1].split(",")) <= project["optional-dependencies"].keys()
    version = (ROOT / ".binder" / "runtime.txt").read_text(encoding="utf-8").strip().removeprefix("python-")
    assert f"Programming Language :: Python :: {version}" in project["classifiers"]
