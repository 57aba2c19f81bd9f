"""Sphinx configuration: the pages of this folder, the README as the first one, and the API from the docstrings.

`make docs` builds the site. Nothing is fetched: no inventories of other projects, no fonts.
"""

from __future__ import annotations

import importlib
import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "docs")]

import docstrings  # noqa: E402

import moe_ep  # noqa: E402

project = "moe_ep"
release = moe_ep.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.viewcode"]
html_theme = "furo"
html_title = f"moe_ep {release}"
html_show_copyright = False
exclude_patterns = ["deploy"]
myst_heading_anchors = 4
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
python_display_short_literal_types = True
python_maximum_signature_line_length = 100

# The modules whose paths are stable; names that `moe_ep` itself exports are described on its page alone.
MODULES = (
    "moe_ep",
    "moe_ep.layer",
    "moe_ep.modular_kernel",
    "moe_ep.routing",
    "moe_ep.expert_map",
    "moe_ep.scalar_type",
    "moe_ep.eplb",
    "moe_ep.registry",
    "moe_ep.kernels.marlin",
    "moe_ep.kernels.marlin.repack",
    "moe_ep.kernels.align",
    "moe_ep.kernels.mul_sum",
)
API = Path(__file__).parent / "api"


def public_names(module: Any) -> list[str]:
    """The names of `__all__`, or the public ones that the module defines."""
    names = getattr(module, "__all__", None)
    if names is None:
        names = [name for name, value in vars(module).items() if getattr(value, "__module__", "") == module.__name__]
    return [name for name in names if not name.startswith("_")]


def write_api_pages() -> None:
    """One page a module, made anew by every build."""
    API.mkdir(exist_ok=True)
    for name in MODULES:
        module = importlib.import_module(name)
        exported = set(moe_ep.__all__) if name != "moe_ep" else set()
        names = public_names(module)
        elsewhere = [n for n in names if n in exported and getattr(module, n) is getattr(moe_ep, n)]
        own = [n for n in names if n not in elsewhere]
        lines = [f"# {name}", "", "```{eval-rst}", f".. automodule:: {name}"]
        hidden = [n for n in public_names(module) if n not in own]
        lines += ["   :members:"] + ([f"   :exclude-members: {', '.join(hidden)}"] if hidden else [])
        lines += [
            "   :inherited-members: Module, object, tuple, str, Enum, ABC, Exception",
            "   :show-inheritance:",
            "```",
            "",
        ]
        if elsewhere:
            links = ", ".join(f"[`{n}`](moe_ep.md)" for n in elsewhere)
            lines += [f"Also importable from here: {links}.", ""]
        _write_if_changed(API / f"{name}.md", "\n".join(lines))
    toctree = "\n".join(MODULES)
    intro = "Made from the docstrings. Everything else in the package is internal and may move between versions."
    _write_if_changed(API / "index.md", f"# API reference\n\n{intro}\n\n```{{toctree}}\n{toctree}\n```\n")


def _write_if_changed(path: Path, text: str) -> None:
    if not path.exists() or path.read_text() != text:
        path.write_text(text)


def read_source(app: Any, docname: str, source: list[str]) -> None:
    """Puts the README on the first page, and unlinks what is no page of the site."""
    text = source[0]
    folder = Path(docname).parent
    if docname == "index":
        readme = (ROOT / "README.md").read_text().replace("](docs/", "](")
        text = readme + text.replace("# moe_ep\n", "", 1)
    text = text.replace("../README.md", "index.md")

    def resolve(match: re.Match[str]) -> str:
        words, target = match.groups()
        path = (Path(app.srcdir) / folder / target.partition("#")[0]).resolve()
        is_page = target.startswith(("https://", "#")) or (path.is_file() and path.is_relative_to(app.srcdir))
        return match.group() if is_page else words

    source[0] = re.sub(r"(?<!!)\[([^\]]*)\]\(([^)\s]+)\)", resolve, text)


def format_docstring(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    lines[:] = docstrings.to_rst(lines)


def check_coverage(app: Any, error: Exception | None) -> None:
    """Fails the build if a public name has no entry in the reference."""
    if error is None and app.builder.name == "html":
        described = set(app.env.get_domain("py").objects)
        wanted = {f"moe_ep.{name}" for name in public_names(moe_ep)}
        if missing := wanted - described:
            raise RuntimeError(f"the API reference lacks {', '.join(sorted(missing))}; give them docstrings")


def setup(app: Any) -> None:
    write_api_pages()
    app.connect("source-read", read_source)
    app.connect("autodoc-process-docstring", format_docstring)
    app.connect("build-finished", check_coverage)
