"""Hook of MkDocs: links to files outside of docs/ lead to the repository."""

from __future__ import annotations

import posixpath
import re
from typing import Any

_LINK = re.compile(r"(\]\()((?:\.\./)+[^)#\s]*)")


def on_page_markdown(markdown: str, *, page: Any, config: Any, **_: Any) -> str:
    """Replace every relative link that leaves docs/ by an address in the repository. MkDocs checks the other links."""
    folder = posixpath.join("docs", posixpath.dirname(page.file.src_uri))

    def rewrite_link(match: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join(folder, match[2]))
        if path.startswith("docs/"):
            return match[0]
        return f"{match[1]}{config.repo_url.rstrip('/')}/blob/main/{path}"

    return _LINK.sub(rewrite_link, markdown)
