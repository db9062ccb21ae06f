"""Links of the repository's pages where the repository is not: on a package index and on the docs site.

They lead to the repository's public address, `repository` of `[tool.ctxext]` in pyproject.toml. While that is empty, a
link is its plain words, and a picture is left out.
"""

from __future__ import annotations

import re

# A link or picture with a relative target: "!" or "", words, path, anchor. The words may hold brackets.
LINK = re.compile(r"(?<!`)(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\((?!\w+:|#)([^)#\s]+)(#[^)\s]*)?\)")


def public_link(link: re.Match[str], path: str, repository: str) -> str:
    """A link to `path` of the repository, in Markdown."""
    image, words, anchor = link[1], link[2], link[4] or ""
    if not repository:
        return "" if image else words
    return f"{image}[{words}]({repository}/{'raw' if image else 'blob'}/main/{path}{anchor})"


def with_public_links(readme: str, repository: str) -> str:
    """The README as it is shown elsewhere."""
    return LINK.sub(lambda link: public_link(link, link[3], repository), readme)
