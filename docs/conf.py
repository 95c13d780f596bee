"""How `make docs` turns docs/, the README and the docstrings of attention/ into one static site."""

import os
import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

project = "gpt-attention"
extensions = ["myst_parser", "sphinx.ext.autodoc"]
myst_enable_extensions = ["attrs_inline"]
myst_heading_anchors = 3
exclude_patterns = ["_build", "README.md"]  # the latter is for readers on a forge
html_theme = "furo"
html_title = project
html_static_path = ["site.css"]
html_css_files = ["site.css"]
html_extra_path = ["_build/extra"]  # learn's page, which make puts there
html_show_sphinx = False
html_show_copyright = False
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True


def read_source(app: object, name: str, source: list[str]) -> None:
    """Let links and images that work in a repository work on the site; what does not exist fails the build.

    The front page is the README, followed by index.md's table of contents.
    """
    folder = (Path(__file__).parent / name).parent
    text = source[0].replace("(../README.md)", "(index.md)")
    if name == "index":
        text = as_images((ROOT / "README.md").read_text(encoding="utf-8"))
        text = text.replace(", [docs/README.md](docs/README.md) all pages.", ".")
        text = re.sub(
            r"(!?\[[^\]]*\])\((?!https?:|#)([^)]+)\)",
            lambda m: f"{m[1]}({os.path.relpath(ROOT / m[2], folder)})",
            text,
        )
        text += "\n" + source[0]
    # A site has no folders and no results of benchmarks to show: their names stay, without a link.
    source[0] = re.sub(
        r"(?<!!)\[([^\]]*)\]\((?!https?:|#)([^)#]+)\)",
        lambda m: m[1] if (folder / m[2]).is_dir() or "bench/results/" in m[2] else m[0],
        as_images(text),
    )


def as_images(text: str) -> str:
    """HTML's <picture> and <img> as Markdown images, which the generator copies and checks."""
    text = re.sub(
        r"<picture>.*?srcset=\"([^\"]+)\".*?alt=\"([^\"]*)\" src=\"([^\"]+)\".*?</picture>",
        r"![\2](\3){.only-light} ![\2](\1){.only-dark}",
        text,
        flags=re.DOTALL,
    )
    return re.sub(r"<img alt=\"([^\"]*)\" src=\"([^\"]+)\"[^>]*>", r"![\1](\2)", text)


def keep_columns(app: object, what: str, name: str, obj: object, options: object, lines: list[str]) -> None:
    """Docstrings are plain text: paragraphs stay paragraphs, and arguments aligned in columns stay aligned."""
    written = []
    for paragraph in "\n".join(lines).strip("\n").split("\n\n"):
        if re.search(r"\S {2,}\S|^ ", paragraph, re.MULTILINE):
            written += [".. code-block:: text", "", *[f"   {line}" for line in paragraph.splitlines()], ""]
        else:
            pieces = re.split(r"(`[^`]*`)", paragraph)
            pieces = [f"`{x}`" if x.startswith("`") else re.sub(r"([*_|])", r"\\\1", x) for x in pieces]
            written += ["".join(pieces), ""]
    lines[:] = "\n".join(written).splitlines()


def setup(app: object) -> None:
    """Called by Sphinx."""
    app.connect("source-read", read_source)  # type: ignore[attr-defined]
    app.connect("autodoc-process-docstring", keep_columns)  # type: ignore[attr-defined]
