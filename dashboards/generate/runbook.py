"""The runbook as the live page serves it: `docs/runbook.md` in HTML, with the names of the alerts as anchors, as in that file."""

from __future__ import annotations

import re

from markdown_it import MarkdownIt

HEAD = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>Runbook</title>
<link rel="stylesheet" href="static/page.css">
</head>
<body>
<main class="runbook">
<p><a href=".">Back to the run</a></p>
"""

END = """</main>
</body>
</html>
"""


def rendered(markdown: str) -> str:
    """The page. Links to other files of the documentation, which the live page does not serve, become plain words."""
    text = re.sub(r"\[([^\]]+)\]\((?!#)[^)]*\)", r"\1", markdown)
    body = MarkdownIt("commonmark").enable("table").render(text)
    with_anchors = re.sub(r"<h2>(\w+)</h2>", r'<h2 id="\1">\1</h2>', body)
    return HEAD + re.sub(r'<p><a id="\w+"></a></p>\n', "", with_anchors) + END
