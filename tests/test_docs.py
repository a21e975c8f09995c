"""Every link within the documentation leads somewhere."""

import re
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[1]
PAGES = [REPO / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")] + sorted(
    (REPO / "docs").rglob("*.md")
)
LINK = re.compile(r"\[(?:[^\[\]]|\[[^\]]*\])*\]\(<?([^)\s>]+)>?(?:\s+\"[^\"]*\")?\)")


def prose(page):
    text = re.sub(r"^(```|~~~).*?^\1", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    return text


def links(page):
    text = re.sub(r"`[^`\n]*`", "code", prose(page))
    # An image may itself be the text of a link.
    found = (
        LINK.findall(text) + re.findall(r"!\[[^\]]*\]\(([^)\s]+)", text) + re.findall(r'(?:src|href)="([^"]+)"', text)
    )
    return [link for link in dict.fromkeys(found) if not re.match(r"[a-z]+:", link)]


def anchors(page):
    """As GitHub makes them: lower case, no punctuation, hyphens for spaces, -1 for the second of a name."""
    found = []
    for heading in re.findall(r"^#{1,6} +(.*?) *#*$", prose(page), re.MULTILINE):
        text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        slug = re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-")
        found.append(f"{slug}-{found.count(slug)}" if slug in found else slug)
    return found


def dead_links(page):
    for link in links(page):
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.exists():
            yield f"{link}: there is no {target}"
        elif anchor and anchor not in anchors(target):
            yield f"{link}: no heading of {target.name} makes #{anchor}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(REPO).as_posix())
def test_links(page):
    assert list(dead_links(page)) == []


def test_dead_links_are_found(tmp_path):
    (tmp_path / "other.md").write_text("# A `b.c`, [d](e)!\n## Same\n## Same\n```\n# no heading\n```\n")
    page = tmp_path / "page.md"
    page.write_text(
        "# Top\n[1](other.md) [2](other.md#a-bc-d) [3](#top) [4](other.md#same-1) [5](https://a.b/c) `[6](code)`\n"
        "[a](gone.md) ![b](gone.png) [![c](gone2.png)](other.md) [d](other.md#same-2) [e](#no-heading)\n"
    )
    assert [text.partition(":")[0] for text in dead_links(page)] == [
        "gone.md", "gone.png", "other.md#same-2", "#no-heading", "gone2.png",
    ]  # fmt: skip
