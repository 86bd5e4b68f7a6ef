"""What MkDocs is told while it builds the site: links to files outside of docs/ lead to the repository."""

from __future__ import annotations

import posixpath
import re
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

    return _LINK.sub(leads_to, markdown)
