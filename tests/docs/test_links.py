"""Links of the documents lead somewhere: to a file of the repository, and to a heading where they name one."""

from __future__ import annotations

import re
import unicodedata
from pathlib import Path

ROOT = Path(__file__).parents[2]
MADE = (ROOT / "docs" / "api", ROOT / "docs" / "_build")  # by `make docs`
PAGES = (
    *sorted(ROOT.glob("*.md")),
    *sorted(page for page in (ROOT / "docs").rglob("*.md") if not set(MADE) & set(page.parents)),
)


def anchors(page: Path) -> set[str]:
    """What GitHub calls the headings of a page: small letters and digits, spaces as hyphens, the rest left out."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    found = set()
    for heading in re.findall(r"^#+ (.*)$", text, re.MULTILINE):
        kept = (c for c in heading.lower() if c in " -_" or unicodedata.category(c)[0] in "LN")
        found.add("".join(kept).replace(" ", "-"))
    return found


def test_links() -> None:
    broken = []
    for page in PAGES:
        text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
        for link in re.findall(r"\]\(([^)\s]+)\)", text):
            if link.startswith("https://"):
                continue
            path, _, anchor = link.partition("#")
            target = (page.parent / path).resolve() if path else page
            if any(folder in target.parents for folder in MADE):
                continue  # whose links `make docs` checks
            if (
                not target.exists()
                or ROOT not in (target, *target.parents)
                or (anchor and anchor not in anchors(target))
            ):
                broken.append(f"{page.relative_to(ROOT)}: {link}")
    assert not broken


def test_the_readme_leads_to_every_page() -> None:
    """To the pages of docs/ itself; those of docs/benchmarks/ are listed there."""
    for index, folder in (
        (ROOT / "README.md", ROOT / "docs"),
        (ROOT / "docs/benchmarks/README.md", ROOT / "docs/benchmarks"),
    ):
        linked = {(index.parent / link).resolve() for link in re.findall(r"\]\(([^)#\s]+)", index.read_text())}
        assert set(folder.glob("*.md")) - {index, ROOT / "docs" / "index.md"} <= linked
