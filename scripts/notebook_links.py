"""Where a notebook opens in a browser: its addresses on Colab and on Binder.

Owns the forms of these addresses, and how they get into pages and notebooks. They follow from the repository's own
address, which stands in one place, pyproject.toml's [project.urls]; scripts/release.py writes it there. Until then
nobody knows it, and there are no links.
"""

from __future__ import annotations

import posixpath
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote

ROOT = Path(__file__).parents[1]
BRANCH = "main"
GITHUB = "https://github.com/"
TO_NOTEBOOK = re.compile(r"\[[^\]]+\]\((?![a-z]+:)([^)\s]+\.ipynb)\)(?! \(\[)")  # and to no more than that yet
OPEN, REPOSITORY = "Open it in ", 'REPOSITORY = "'


def address(root: Path = ROOT) -> str | None:
    """The repository's, if it is known."""
    urls: Mapping[str, str] = tomllib.loads((root / "pyproject.toml").read_text("utf-8"))["project"].get("urls", {})
    return urls.get("Repository")


def links(path: str, address: str, ref: str = BRANCH) -> dict[str, str]:
    """By service, where a notebook of the repository opens. Colab reads from GitHub alone, Binder from any Git.

    >>> links("docs/a.ipynb", "https://github.com/o/n")["Colab"]
    'https://colab.research.google.com/github/o/n/blob/main/docs/a.ipynb'
    >>> links("docs/a.ipynb", "https://h.example/o/n", "v1")
    {'Binder': 'https://mybinder.org/v2/git/https%3A%2F%2Fh.example%2Fo%2Fn/v1?labpath=docs%2Fa.ipynb'}
    """
    binder = "https://mybinder.org/v2/{}/" + ref + "?labpath=" + quote(path, safe="")
    if not address.startswith(GITHUB):
        return {"Binder": binder.format(f"git/{quote(address, safe='')}")}
    name = address.removeprefix(GITHUB).strip("/")
    return {
        "Colab": f"https://colab.research.google.com/github/{name}/blob/{ref}/{path}",
        "Binder": binder.format(f"gh/{name}"),
    }


def _written(path: str, address: str, ref: str, between: str) -> str:
    return between.join(f"[{service}]({at})" for service, at in links(path, address, ref).items())


def linked(markdown: str, page: str, address: str | None, ref: str = BRANCH) -> str:
    """A page of the repository, with where it opens after every link to a notebook; as it is without an address.

    >>> linked("[a](../a.ipynb)", "docs/page.md", "https://h.example/o/n")
    '[a](../a.ipynb) ([Binder](https://mybinder.org/v2/git/https%3A%2F%2Fh.example%2Fo%2Fn/main?labpath=a.ipynb))'
    """
    if address is None:
        return markdown

    def followed(match: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join(posixpath.dirname(page), match[1]))
        return f"{match[0]} ({_written(path, address, ref, ', ')})"

    return TO_NOTEBOOK.sub(followed, markdown)


def tell(notebook: Any, path: str, address: str | None, ref: str = BRANCH) -> Any:
    """A notebook that says where it opens, in its first cell, and from where it installs the package, in its second."""
    title, install, *_ = notebook.cells
    kept = [part for part in title.source.split("\n\n") if not part.startswith(OPEN)]
    if address is not None:
        kept.append(f"{OPEN}{_written(path, address, ref, ' or ')}.")
    title.source = "\n\n".join(kept)
    install.source = re.sub(rf'(?m)^{REPOSITORY}[^"]*"', f'{REPOSITORY}{address or ""}"', install.source)
    return notebook
