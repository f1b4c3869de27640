"""What is released: metadata that agree, pages that an index can show, and workflows that run what there is."""

import os
import re
import shutil
import tomllib
from pathlib import Path
from typing import Any

import pytest

import release

ROOT = Path(__file__).parents[2]
ADDRESS = "https://host.example/owner/name"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
TAG = f"v{PROJECT['version']}"
WORKFLOWS = ROOT / ".github" / "workflows"  # which no archive of the source has

checkout_needed = pytest.mark.skipif(not WORKFLOWS.is_dir(), reason="the workflows are in a checkout only")


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """What the script reads, in a folder of its own."""
    for name in ("pyproject.toml", "README.md", "CITATION.cff"):
        shutil.copy(ROOT / name, tmp_path)
    return tmp_path


def links(folder: Path) -> list[str]:
    return re.findall(r"\]\(([^)\s]+)\)", (folder / "README.md").read_text(encoding="utf-8"))


def test_an_index_page_can_follow_every_link(copy: Path) -> None:
    """No link is relative any more; each goes to a file of the tag that is there, images to their bytes, and
    notebooks open in a browser."""
    before = links(copy)
    release.main(ADDRESS, TAG, copy)
    after = [link for link in links(copy) if not link.startswith("https://mybinder.org")]
    assert len(links(copy)) - len(after) == sum(link.endswith(".ipynb") for link in before) == 2
    assert len(after) == len(before)
    assert {Path(link).suffix for link in after} >= {".png", ".gif"}
    for was, link in zip(before, after, strict=True):
        if was.startswith("https:"):
            assert link == was
            continue
        kind = "raw" if was.endswith((".png", ".gif")) else "blob"
        assert link == f"{ADDRESS}/{kind}/{TAG}/{was}"
        assert (ROOT / was.partition("#")[0]).exists()


def test_the_address_is_in_the_metadata(copy: Path) -> None:
    """The project's URLs are of the repository that releases it, and all else is as it was."""
    release.main(ADDRESS, TAG, copy)
    after = tomllib.loads((copy / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert after.pop("urls")["Issues"] == f"{ADDRESS}/issues"
    assert after == PROJECT


def test_an_address_that_is_known_is_kept(copy: Path) -> None:
    """A release from the same repository leaves it as it is; one from elsewhere is refused, and changes nothing."""
    release.main(ADDRESS, TAG, copy)
    shutil.copy(ROOT / "README.md", copy)
    project, readme = (copy / "pyproject.toml").read_text(), (copy / "README.md").read_text()
    with pytest.raises(ValueError, match=f"the repository is {ADDRESS}; got {ADDRESS}-2"):
        release.main(f"{ADDRESS}-2", TAG, copy)
    assert (copy / "README.md").read_text() == readme
    release.main(ADDRESS, TAG, copy)
    assert (copy / "pyproject.toml").read_text() == project


@pytest.mark.parametrize("change", ["tag", "citation"])
def test_another_version_is_not_released(copy: Path, change: str) -> None:
    """Where the tag, or what people cite, is of another version, nothing is changed."""
    before = [(copy / name).read_text() for name in ("pyproject.toml", "README.md")]
    if change == "citation":
        (copy / "CITATION.cff").write_text("cff-version: 1.2.0\nversion: 0.0.0\n")
    with pytest.raises(ValueError, match="must say the same"):
        release.main(ADDRESS, TAG if change == "citation" else "v9.9.9", copy)
    assert [(copy / name).read_text() for name in ("pyproject.toml", "README.md")] == before


@checkout_needed
def test_every_python_that_is_promised_is_tested() -> None:
    """The public workflow runs the Pythons of the classifiers, and the wheel's too."""
    promised = [each.rpartition(" ")[2] for each in PROJECT["classifiers"] if "Python :: 3." in each]
    tested = re.findall(r"python: \[(.*)\]", (WORKFLOWS / "ci.yml").read_text())
    assert len(tested) == 2
    assert all([each.strip('"') for each in row.split(", ")] == promised for row in tested)
    assert PROJECT["requires-python"] == f">={promised[0]}"


@checkout_needed
@pytest.mark.parametrize("path", sorted(ROOT.glob(".github/**/*.yml")), ids=lambda path: path.name)
def test_workflows_and_forms_are_what_they_should_be(path: Path) -> None:
    """YAML that can be read; scripts that are run are there; forms have what a form must have."""
    yaml = pytest.importorskip("yaml")
    text = path.read_text(encoding="utf-8")
    found: dict[str, Any] = yaml.safe_load(text)
    for script in re.findall(r"run: (\.ci/\w+)", text):
        assert os.access(ROOT / script, os.X_OK), script
    for script in re.findall(r"(scripts/\w+\.py)", text):
        assert (ROOT / script).is_file()
    if "ISSUE_TEMPLATE" in str(path) and path.name != "config.yml":
        assert {"name", "description", "body"} <= found.keys()
        ids = [each["id"] for each in found["body"]]
        assert len(set(ids)) == len(ids)
        assert all(each["type"] in ("textarea", "input") and each["attributes"]["label"] for each in found["body"])
        assert any(each.get("validations", {}).get("required") for each in found["body"])
