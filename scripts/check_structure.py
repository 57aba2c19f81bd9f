#!/usr/bin/env python3
"""Measures the structure of the repository and fails where a number is above its recorded ceiling.

    python scripts/check_structure.py            # prints a table; exit code 1 if a number is above its ceiling
    python scripts/check_structure.py --list     # also what each number counts
    python scripts/check_structure.py --lower    # records today's number as the ceiling wherever it is lower

Ceilings and targets lie in scripts/structure.json. A ceiling goes down, or up with the commit that says why.
Package lines have a target alone: a new feature may add lines.

Definitions:

- A module is a .py file of moe_ep/, kernels/, dispatch/ or launch/. It imports what its statements name, at module
  level, under `if TYPE_CHECKING` and in functions, and what its strings "moe_ep.x.y:Name" name. A name that is imported
  from a package's `__init__` is an import of that `__init__` and of the module that defines the name.
- A module has one importer if exactly one other module imports it. An `__init__` that re-exports a name in `__all__` is
  no importer. Not counted are `__init__` and `__main__`, commands (launch/cli/commands), entries of a registry (modules
  that a string of moe_ep/registry.py names), the stable module paths, and modules whose names an `__init__` re-exports.
- A cycle is a strongly connected set of two or more modules under imports at module level and under
  `if TYPE_CHECKING`; the number is the modules in such sets. An import of a name from a package is an edge to the
  package's `__init__`, so a module that imports from the facade of its own package closes a cycle; that importing
  `a.b.c` runs the `__init__` of `a.b` first is no edge. A second number adds the imports in functions.
- A private name in a test is one with a leading underscore that the package defines and the test's file does not, read
  from another object, imported, or given to setattr or mock.patch; tests use public names.
- A name is assigned twice if two statements at the top of a module give it values, as after a careless merge of two
  modules with constants of one name: then functions of both use the second value.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import sys
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
WINGS = ("moe_ep", "kernels", "dispatch", "launch")
STABLE = {
    "moe_ep", "moe_ep.layer", "moe_ep.modular_kernel", "moe_ep.routing", "moe_ep.expert_map", "moe_ep.scalar_type",
    "moe_ep.eplb", "moe_ep.registry", "moe_ep.kernels.marlin", "moe_ep.kernels.marlin.repack", "moe_ep.kernels.align",
    "moe_ep.kernels.mul_sum",
}  # fmt: skip

# Words that the field's own terms replace. Brackets keep this file from matching itself.
REPLACED = re.compile(
    r"\b(m[e]nd(s|ed|ing|er|ers|able)?|(un)?he[e]d(s|ed|ing|less|ful)?|rol[l]\s*calls?|(comes?|came|coming)\s*h[o]me"
    r"|homec[o]ming|d[e]ar(er|est|ly)?|rehe[a]rs(e|es|ed|ing|al|als)|jo[u]rney(s|ed|ing)?)\b"
)
TEXT = {".py", ".cu", ".cuh", ".md", ".toml", ".txt", ".yaml", ".yml", ".sh", ".json", ".in", ""}
# Of torch and of named tuples, where the package defines such names too.
FOREIGN = {"_apply", "_buffers", "_fields"}
PATCHES = {"setattr", "delattr", "getattr", "object", "multiple", "patch"}
NOT_OURS = {"tests", "build", "dist", "_build", "api", "reproduced", "__pycache__"}


@dataclass
class Module:
    """A module and what it imports; a name that is imported from a package stands as "package:name"."""

    name: str
    path: Path
    top: set[str] = field(default_factory=set)
    typing: set[str] = field(default_factory=set)
    in_functions: set[str] = field(default_factory=set)
    strings: set[str] = field(default_factory=set)
    re_exports: dict[str, str] = field(default_factory=dict)
    exported: set[str] = field(default_factory=set)

    @property
    def is_facade(self) -> bool:
        return self.path.name == "__init__.py"


class _Imports(ast.NodeVisitor):
    """Fills a module's imports."""

    def __init__(self, module: Module, known: set[str]) -> None:
        self.module, self.known, self.kind = module, known, module.top

    def visit_If(self, node: ast.If) -> None:
        before = self.kind
        if "TYPE_CHECKING" in ast.unparse(node.test) and before is self.module.top:
            self.kind = self.module.typing
        for child in node.body:
            self.visit(child)
        self.kind = before
        for child in [node.test, *node.orelse]:
            self.visit(child)

    def _function(self, node: ast.AST) -> None:
        before, self.kind = self.kind, self.module.in_functions
        self.generic_visit(node)
        self.kind = before

    visit_FunctionDef = visit_AsyncFunctionDef = visit_Lambda = _function

    def visit_Import(self, node: ast.Import) -> None:
        self.kind |= {alias.name for alias in node.names} & self.known

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        base = node.module or ""
        if node.level:
            package = self.module.name.split(".")
            package = package[: len(package) - node.level + self.module.is_facade]
            base = ".".join([*package, base] if base else package)
        for name in (alias.name for alias in node.names):
            if f"{base}.{name}" in self.known:
                self.kind.add(f"{base}.{name}")
            elif base in self.known:
                self.kind.add(f"{base}:{name}")
                self.module.re_exports[name] = base

    def visit_Assign(self, node: ast.Assign) -> None:
        if any(isinstance(target, ast.Name) and target.id == "__all__" for target in node.targets):
            self.module.exported |= {leaf.value for leaf in ast.walk(node.value) if isinstance(leaf, ast.Constant)}
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, str) and re.fullmatch(r"moe_ep(\.\w+)+:\w+", node.value):
            self.module.strings.add(node.value)


def walk(folder: Path) -> Iterator[Path]:
    """The files below a folder, without caches and without following links."""
    for path in sorted(folder.iterdir()):
        hidden = path.name.startswith(".") and path.name not in (".ci", ".github")
        if path.is_symlink() or path.name in NOT_OURS or path.name.endswith(".egg-info"):
            continue
        if path.is_dir() and not hidden:
            yield from walk(path)
        elif path.is_file():
            yield path


def package_files(root: Path, *suffixes: str) -> list[Path]:
    """The package's files with such a suffix."""
    return [path for wing in WINGS for path in walk(root / wing) if path.suffix in suffixes]


def read_modules(root: Path) -> dict[str, Module]:
    """Every module of the package by its dotted name."""
    modules = {}
    for path in package_files(root, ".py"):
        parts = list(path.relative_to(root).with_suffix("").parts)
        parts = parts if parts[0] == "moe_ep" else ["moe_ep", *parts]
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        modules[name] = Module(name, path)
    for module in modules.values():
        _Imports(module, set(modules)).visit(ast.parse(module.path.read_text(encoding="utf-8")))
    return modules


def defining_module(target: str, modules: dict[str, Module]) -> str:
    """The module that defines what `target` names, facades seen through."""
    base, _, name = target.partition(":")
    seen = set()
    while base in modules and modules[base].is_facade and name in modules[base].re_exports and base not in seen:
        seen.add(base)
        base = modules[base].re_exports[name]
    return base


def single_importers(modules: dict[str, Module]) -> list[str]:
    """The modules with one importer that are neither commands, nor registry entries, nor public; each with it."""
    importers: dict[str, set[str]] = defaultdict(set)
    entries = modules["moe_ep.registry"].strings if "moe_ep.registry" in modules else set()
    public = STABLE | {target.partition(":")[0] for target in entries}
    for module in modules.values():
        for target in module.top | module.typing | module.in_functions | module.strings:
            if module.is_facade and target.partition(":")[2] in module.exported:
                public.add(defining_module(target, modules))
                continue
            for imported in {target.partition(":")[0], defining_module(target, modules)} - {module.name}:
                importers[imported].add(module.name)
    return [
        f"{name}  <- {next(iter(importers[name]))}"
        for name, module in sorted(modules.items())
        if len(importers[name]) == 1
        and not module.is_facade
        and module.path.name != "__main__.py"
        and ".launch.cli.commands." not in name
        and name not in public
    ]


def cycles(modules: dict[str, Module], with_functions: bool = False) -> list[list[str]]:
    """The strongly connected sets of two modules or more, by Tarjan's algorithm."""
    graph = {}
    for module in modules.values():
        targets = module.top | module.typing | (module.in_functions if with_functions else set())
        graph[module.name] = sorted({target.partition(":")[0] for target in targets} - {module.name})
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(name: str) -> None:
        index[name] = low[name] = len(index)
        stack.append(name)
        for other in graph[name]:
            if other not in index:
                visit(other)
                low[name] = min(low[name], low[other])
            elif other in stack:
                low[name] = min(low[name], index[other])
        if low[name] == index[name]:
            members = stack[stack.index(name) :]
            del stack[stack.index(name) :]
            if len(members) > 1:
                found.append(sorted(members))

    for name in graph:
        if name not in index:
            visit(name)
    return sorted(found)


def replaced_words(root: Path) -> list[str]:
    """Every use of a replaced word outside of tests, in text, in names of any case, and in names of files."""
    found = []
    for path in walk(root):
        relative = path.relative_to(root).as_posix()
        if path.suffix not in TEXT or not (text := _text_of(path)):
            continue
        text = re.sub(r"(?<=[a-z])(?=[A-Z])", " ", f"{relative}\n{text}")
        text = re.sub(r"[^a-z\n]", " ", text.lower())
        for match in REPLACED.finditer(text):
            word = " ".join(match.group().split())
            found.append(f"{relative}:{text.count(chr(10), 0, match.start())}: {word}")
    return found


def _text_of(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        return ""


def assigned_twice(modules: dict[str, Module]) -> list[str]:
    """The names that a module gives values at its top more than once."""
    found = []
    for module in modules.values():
        statements = ast.parse(module.path.read_text(encoding="utf-8")).body
        targets = [target for each in statements if isinstance(each, ast.Assign) for target in each.targets]
        names = [leaf.id for target in targets for leaf in ast.walk(target) if isinstance(leaf, ast.Name)]
        found += [f"{module.name}: {name}" for name in sorted(set(names)) if names.count(name) > 1]
    return found


def _names_defined(tree: ast.AST, of_others: bool) -> Iterator[str]:
    """Names of functions, classes and variables, and of attributes of self or of any object."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and (of_others or _is_own(node)):
            yield node.attr


def _is_own(node: ast.Attribute) -> bool:
    return isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")


def _names_used(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """(line, name) of attributes of other objects than self, of imports, and of what patches replace."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and not _is_own(node):
            yield node.lineno, node.attr
        elif isinstance(node, ast.ImportFrom):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] in PATCHES:
            given = [leaf.value for leaf in node.args[:2] if isinstance(leaf, ast.Constant)]
            names = [str(value).rpartition(".")[2] for value in given] + [str(word.arg) for word in node.keywords]
            yield from ((node.lineno, name) for name in names)


def private_names_in_tests(root: Path) -> list[str]:
    """Every use of a private name of the package in tests/."""
    trees = (ast.parse(path.read_text(encoding="utf-8")) for path in package_files(root, ".py"))
    private = {name for tree in trees for name in _names_defined(tree, True) if re.match("_[a-zA-Z]", name)} - FOREIGN
    found = []
    for path in sorted((root / "tests").rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        names = private - set(_names_defined(tree, False))
        uses = sorted({use for use in _names_used(tree) if use[1] in names})
        found += [f"{path.relative_to(root).as_posix()}:{line}: {name}" for line, name in uses]
    return found


def words_of(path: Path) -> int:
    """The words of a file as `wc -w` counts them."""
    return len(path.read_text(encoding="utf-8").split())


def measure(root: Path) -> dict[str, tuple[int, list[str]]]:
    """Every number by its key in structure.json, with what it counts."""
    modules = read_modules(root)
    pages = {path.relative_to(root).as_posix(): words_of(path) for path in walk(root / "docs") if path.suffix == ".md"}
    readme = words_of(root / "README.md")
    lists = {
        "modules_with_one_importer": single_importers(modules),
        "files_in_core_root": sorted(path.name for path in (root / "moe_ep").glob("*.py")),
        "names_assigned_twice": assigned_twice(modules),
        "replaced_words": replaced_words(root),
        "private_names_in_tests": private_names_in_tests(root),
    }
    measured = {key: (len(counted), counted) for key, counted in lists.items()}
    for key, with_functions in (("modules_in_cycles", False), ("modules_in_cycles_of_any_import", True)):
        found = cycles(modules, with_functions)
        measured[key] = sum(map(len, found)), [", ".join(members) for members in found]
    measured["readme_words"] = readme, []
    measured["readme_and_docs_words"] = readme + sum(pages.values()), [f"{page}: {n}" for page, n in pages.items()]
    sources = package_files(root, ".py", ".cu", ".cuh")
    measured["package_lines"] = sum(path.read_text(encoding="utf-8").count("\n") for path in sources), []
    return measured


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="print what each number counts")
    parser.add_argument("--lower", action="store_true", help="lower the ceilings to today's numbers")
    parser.add_argument("--root", type=Path, default=ROOT, help="the checkout to measure")
    args = parser.parse_args()
    recorded = args.root / "scripts" / "structure.json"
    limits: dict[str, dict[str, int | None]] = json.loads(recorded.read_text())
    above = []
    print(f"{'':34}{'today':>8}{'ceiling':>9}{'target':>8}")
    for key, (value, counted) in measure(args.root).items():
        ceiling, target = limits[key]["ceiling"], limits[key]["target"]
        is_above = ceiling is not None and value > ceiling
        note = "  above its ceiling" if is_above else ""
        print(f"{key:34}{value:8}{'' if ceiling is None else ceiling:9}{target:8}{note}")
        if args.list or is_above:
            print("".join(f"    {line}\n" for line in counted), end="")
        above += [key] if is_above else []
        limits[key]["ceiling"] = None if ceiling is None else min(value, ceiling)
    if args.lower:
        recorded.write_text("{\n" + ",\n".join(f'  "{k}": {json.dumps(v)}' for k, v in limits.items()) + "\n}\n")
    if above:
        print(f"check_structure: {', '.join(above)} above the ceiling in scripts/structure.json", file=sys.stderr)
    return bool(above)


if __name__ == "__main__":
    sys.exit(main())
