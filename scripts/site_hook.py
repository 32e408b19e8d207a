"""What `make docs` does beyond mkdocs: pages from outside of docs/, and links to files of the repository.

Links are written as they work in the repository. A link to a page leads to that page of the site. Other files are copied to
`files/` of the site, since the repository has no public address to link to. mkdocs reports a link that leads nowhere.
"""

from __future__ import annotations

import os
import pathlib
import re

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = pathlib.Path(__file__).resolve().parent.parent

PAGES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "GOVERNANCE.md": "governance.md",
    "CODE_OF_CONDUCT.md": "code-of-conduct.md",
    "SECURITY.md": "security-policy.md",
    "examples/README.md": "examples.md",
}
"""Pages from outside of docs/, and their places in the site."""

COPIES = "files"
"""The folder of the site with files of the repository that pages link to."""

LINK = re.compile(r"(?<=\]\()(?!https?://|mailto:|#)([^)\s#]+)(#[^)\s]*)?(?=\))")
"""The target of a link or picture within the repository."""

CODE = re.compile(r"^```.*?^```|`[^`\n]+`", re.DOTALL | re.MULTILINE)
"""What is shown as it is: no link is in there."""

ESCAPED_PIPE = re.compile(r"<code>[^<]*\\\|[^<]*</code>")
"""Code in a table. GitHub takes away the backslash, which keeps a column from ending; Python-Markdown does not."""


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the pages from outside of docs/, and the files that pages link to."""
    for source, target in PAGES.items():
        files.append(File.generated(config, target, abs_src_path=str(ROOT / source)))
    sources = {**{file.src_uri: f"docs/{file.src_uri}" for file in files}, **{target: source for source, target in PAGES.items()}}
    for page in files.documentation_pages():
        source = sources[page.src_uri]
        for link, _ in LINK.findall(CODE.sub("", (ROOT / source).read_text(encoding="utf-8"))):
            path = _in_repository(source, link)
            if _in_site(path) == f"{COPIES}/{path}" and (ROOT / path).is_file() and f"{COPIES}/{path}" not in files.src_uris:
                files.append(File.generated(config, f"{COPIES}/{path}", abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:  # noqa: ARG001 - mkdocs gives them by name
    """Writes the links as they work in the site."""
    here = page.file.src_uri
    source = next((source for source, target in PAGES.items() if target == here), f"docs/{here}")

    def moved(link: re.Match[str]) -> str:
        target = _in_site(_in_repository(source, link[1]))
        return os.path.relpath(target, pathlib.PurePosixPath(here).parent) + (link[2] or "")

    parts, end = [], 0
    for code in CODE.finditer(markdown):
        parts += [LINK.sub(moved, markdown[end : code.start()]), code[0]]
        end = code.end()
    return "".join([*parts, LINK.sub(moved, markdown[end:])])


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:  # noqa: ARG001 - as above
    """Shows code in tables as GitHub does."""
    return ESCAPED_PIPE.sub(lambda code: code[0].replace("\\|", "|"), html)


def _in_repository(source: str, link: str) -> str:
    return os.path.normpath(pathlib.PurePosixPath(source).parent / link)


def _in_site(path: str) -> str:
    if path in PAGES:
        return PAGES[path]
    return path.removeprefix("docs/") if path.startswith("docs/") else f"{COPIES}/{path}"
