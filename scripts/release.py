"""Prepare a checkout for a release: what an index page shows must not depend on the checkout.

Writes the repository's address into pyproject.toml as project URLs, where all else reads it, and into README.md's
links and images, which an index page cannot follow otherwise; its notebooks open where they are in the tag. Refuses a
tag that is not the version's, and another address than one that is there already.

    python scripts/release.py https://HOST/OWNER/NAME v1.2.3
"""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path

import notebook_links

ROOT = Path(__file__).parents[1]
IMAGES = (".png", ".svg", ".gif")


def main(address: str, tag: str, root: Path = ROOT) -> None:
    """Change pyproject.toml and README.md in ``root``. ValueError, with nothing changed, for another version's tag or
    another repository's address.
    """
    project, readme = root / "pyproject.toml", root / "README.md"
    text = project.read_text(encoding="utf-8")
    version = tomllib.loads(text)["project"]["version"]
    cited = (root / "CITATION.cff").read_text(encoding="utf-8")
    if tag != f"v{version}" or f"\nversion: {version}\n" not in cited:
        raise ValueError(f"release: pyproject.toml says {version}; CITATION.cff and the tag, {tag}, must say the same.")
    known = notebook_links.address(root)
    if known not in (None, address):
        raise ValueError(f"release: pyproject.toml says that the repository is {known}; got {address}.")
    if known is None:
        project.write_text(text.replace("\n[project.scripts]\n", f"\n{urls(address)}\n[project.scripts]\n"), "utf-8")
    page = notebook_links.linked(readme.read_text(encoding="utf-8"), "README.md", address, tag)
    readme.write_text(absolute(page, f"{address}/{{}}/{tag}"), "utf-8")


def urls(address: str) -> str:
    """The table of project URLs."""
    pages = {
        "Repository": "",
        "Documentation": "/tree/main/docs",
        "Changelog": "/blob/main/CHANGELOG.md",
        "Issues": "/issues",
    }
    return "[project.urls]\n" + "".join(f'{name} = "{address}{page}"\n' for name, page in pages.items())


def absolute(page: str, at: str) -> str:
    """The page with relative links made absolute; ``at`` has a place for ``blob``, or ``raw`` for an image.

    >>> absolute("![x](docs/x.png) [how](docs/how.md) [so](#so)", "https://h/o/n/{}/v1")
    '![x](https://h/o/n/raw/v1/docs/x.png) [how](https://h/o/n/blob/v1/docs/how.md) [so](#so)'
    """

    def linked(match: re.Match[str]) -> str:
        return f"]({at.format('raw' if match[1].endswith(IMAGES) else 'blob')}/{match[1]})"

    return re.sub(r"\]\((?![a-z]+:|#)([^)\s]+)\)", linked, page)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
