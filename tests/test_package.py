"""The package as users get it: one import namespace, layers that point to the core, a wheel that works elsewhere."""

import ast
import os
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
WINGS = ("kernels", "dispatch", "launch")


def run(*command, **kwargs):
    # Without the paths of whoever runs the tests: a checkout on PYTHONPATH would come before what is installed.
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    result = subprocess.run(command, capture_output=True, text=True, timeout=600, env=env, **kwargs)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@pytest.mark.parametrize("wing", WINGS)
def test_wings_are_links_without_an_init(wing):
    assert os.readlink(ROOT / "moe_ep" / wing) == f"../{wing}"
    assert not (ROOT / wing / "__init__.py").exists()


def test_import_kernels_from_the_root_is_never_ours():
    program = (
        "import importlib.util as u; spec = u.find_spec('kernels');"
        "print(spec is None or spec.origin is None or 'moe_ep' not in open(spec.origin).read())"
    )
    assert run(sys.executable, "-c", program, cwd=ROOT).strip() == "True"


def _module_level_imports(path):
    """Names imported when the module is: those under `if TYPE_CHECKING` and inside functions do not count."""

    def walk(nodes):
        for node in nodes:
            if isinstance(node, ast.Import):
                yield from (alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                yield node.module or ""
            elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
                yield from walk(node.orelse)
            elif isinstance(node, ast.If | ast.Try | ast.With | ast.ClassDef):
                for field in ("body", "orelse", "handlers", "finalbody"):
                    yield from walk(getattr(node, field, []))

    return list(walk(ast.parse(path.read_text()).body))


FORBIDDEN = {
    "core": ("moe_ep.kernels", "moe_ep.dispatch", "moe_ep.launch"),
    "kernels": ("moe_ep.dispatch", "moe_ep.launch"),
    "dispatch": ("moe_ep.launch",),
}


@pytest.mark.parametrize("layer", FORBIDDEN)
def test_imports_point_to_the_core(layer):
    if layer == "core":
        files = [p for p in (ROOT / "moe_ep").rglob("*.py") if p.relative_to(ROOT / "moe_ep").parts[0] not in WINGS]
    else:
        files = list((ROOT / layer).rglob("*.py"))
    assert files
    offences = [
        f"{path.relative_to(ROOT)} imports {name}"
        for path in files
        for name in _module_level_imports(path)
        if name.startswith(FORBIDDEN[layer])
    ]
    assert not offences


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    # Built from a copy: a build folder left in the checkout would put files into the wheel that are gone.
    source = folder / "source"
    for name in ("moe_ep", *WINGS):
        shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    run(
        sys.executable, "-m", "pip", "wheel", str(source), "-q", "--no-deps", "--no-build-isolation", "-w", str(folder)
    )  # fmt: skip
    (path,) = folder.glob("*.whl")
    return path


def test_the_wheel_has_one_top_level_name_and_real_copies(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    tops = {name.split("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"moe_ep"}
    for source in [*ROOT.glob("moe_ep/**/*.py"), *(p for wing in WINGS for p in (ROOT / wing).rglob("*.py"))]:
        relative = source.relative_to(ROOT).as_posix()
        assert (relative if relative.startswith("moe_ep/") else f"moe_ep/{relative}") in names
    assert "moe_ep/py.typed" in names


def test_the_wheel_works_in_a_fresh_environment(wheel, tmp_path):
    environment = tmp_path / "venv"
    venv.create(environment, with_pip=False)
    python = environment / "bin" / "python"
    site = Path(run(str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip())
    # The dependencies come from this environment, so that gigabytes are not installed twice; moe_ep itself must not.
    run(sys.executable, "-m", "pip", "-q", "--python", str(python), "install", "--no-deps", str(wheel))
    borrowed = "\n".join(f"import site; site.addsitedir({sysconfig.get_path(p)!r})" for p in ("purelib",))
    (site / "zz_dependencies.pth").write_text(borrowed + "\n")
    where = run(str(python), "-c", "import moe_ep.kernels.reference as r; print(r.__file__)", cwd=tmp_path)
    assert Path(where.strip()).is_relative_to(site)
    assert "run" in run(str(environment / "bin" / "moe-ep"), "--help", cwd=tmp_path)
    assert "usage" in run(str(python), "-m", "moe_ep.launch", "--help", cwd=tmp_path)
