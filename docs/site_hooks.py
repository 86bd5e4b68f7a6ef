"""What MkDocs does while it builds the site.

Links to files outside of docs/ lead to the repository. The page of decisions lists them all.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

_LINK = re.compile(r"(\]\()((?:\.\./)+[^)#\s]*)")


def on_page_markdown(markdown: str, *, page: Any, config: Any, **_: Any) -> str:
    """Give every relative link that leaves docs/ the repository's address; the rest is checked by MkDocs."""
    folder = posixpath.join("docs", posixpath.dirname(page.file.src_uri))

    def leads_to(found: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join(folder, found[2]))
        if path.startswith("docs/"):
            return found[0]
        return f"{found[1]}{config.repo_url.rstrip('/')}/blob/main/{path}"

    return _LINK.sub(leads_to, markdown) + (_decisions(config) if page.file.src_uri == "decisions/index.md" else "")


def _decisions(config: Any) -> str:
    pages = sorted(Path(config.docs_dir, "decisions").glob("[0-9]*.md"))
    titles = (page.read_text(encoding="utf-8").splitlines()[0].removeprefix("# ") for page in pages)
    return "\n" + "".join(f"- [{title}]({page.name})\n" for page, title in zip(pages, titles, strict=True))
