"""Lets mkdocs build the site from files that GitHub shows as well (`hooks` in mkdocs.yml).

The front page is README.md, and pages link to files next to docs/. On the site these are in one folder with the pages.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
FRONT_PAGE = "index.md"
LINK = re.compile(r"(?<=\]\()(?!https?://|#)([^)\s#]+)")


def on_files(files: Files, config: Any) -> Files:
    """Add README and the other pages next to docs/, and every file outside docs/ that a page links to."""
    pages = {FRONT_PAGE if path.name == "README.md" else path.name: path for path in ROOT.glob("*.md")}
    texts = [(path.read_text(), ROOT) for path in pages.values()]
    texts += [(file.content_string, ROOT / "docs") for file in files.documentation_pages()]
    targets = {(folder / link).resolve() for text, folder in texts for link in LINK.findall(text)}
    outside = {path for path in targets if path.is_file() and not path.is_relative_to(ROOT / "docs")}
    linked = {str(path.relative_to(ROOT)): path for path in outside - set(pages.values())}
    for name, path in {**linked, **pages}.items():
        files.append(File.generated(config, name, abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Point the links at where the files are on the site."""
    prefix = "docs/" if (ROOT / page.file.src_uri).exists() or page.file.src_uri == FRONT_PAGE else "../"
    renamed = LINK.sub(lambda match: match[1].removeprefix(prefix), markdown)
    return renamed.replace("](README.md", f"]({FRONT_PAGE}")


def on_page_content(html: str, **_: Any) -> str:
    """Show `|` in a table's code as GitHub does, where it must be written as `\\|`."""
    return re.sub(r"<td>.*?</td>", lambda match: match[0].replace("\\|", "|"), html)
