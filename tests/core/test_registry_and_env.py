"""Choices by name and environment variables: defaults, parsing, and the sentences."""

import dataclasses
import os
import pathlib
import subprocess
import sys

import pytest

from moe_ep import env
from moe_ep.registry import ALL2ALL_BACKENDS, EXPERTS, QUANT_METHODS, Registry


@pytest.mark.parametrize("registry", [ALL2ALL_BACKENDS, EXPERTS, QUANT_METHODS])
def test_every_entry_loads(registry):
    for name in registry:
        assert isinstance(registry.load(name), type)
        assert registry[name].summary


def test_unknown_name_lists_the_known():
    with pytest.raises(ValueError, match="all2all_backend is 'foo'.* no_ep, .*batched_all_to_all"):
        ALL2ALL_BACKENDS.check("foo", also=("auto",))


def test_register_adds_a_choice_and_checks_its_form():
    registry = Registry("thing", {})
    registry.register("path", "pathlib:Path", "a path")
    assert registry.load("path").__name__ == "Path" and list(registry) == ["path"] and "path" in registry
    for target in ("pathlib.Path", "pathlib:", ":Path", "pathlib:Path:open", pathlib.Path, None):
        with pytest.raises(ValueError, match="^target is"):
            registry.register("bad", target, "")
    for name in ("", "auto", 3, None):
        with pytest.raises(ValueError, match=f"^name is {name!r}; it must be "):
            registry.register(name, "pathlib:Path", "")
    assert list(registry) == ["path"]


def test_what_was_registered_wrongly_is_named():
    registry = Registry("thing", {}, contract="pathlib:PurePath")
    registry.register("path", "pathlib:PosixPath", "a path")
    registry.register("typo", "pathlib:Paht", "")
    registry.register("other", "decimal:Decimal", "")
    registry.register("function", "os:getcwd", "")
    registry.register("gone", "moe_ep.no_such_part.of_it:Path", "")
    assert registry.load("path").__name__ == "PosixPath"
    with pytest.raises(ImportError, match="pathlib has no 'Paht'"):
        registry.load("typo")
    with pytest.raises(ImportError, match="thing 'gone' is moe_ep.no_such_part.of_it:Path and there is no module "):
        registry.load("gone")
    for name in ("other", "function"):
        with pytest.raises(TypeError, match=f"thing '{name}' is .*; it must be a subclass of pathlib:PurePath"):
            registry.load(name)


def test_defaults_without_variables(monkeypatch):
    for variable in env.ALL:
        monkeypatch.delenv(variable.name, raising=False)
        assert variable.get() == variable.parse(variable.default)
        assert variable.meaning and variable.name.startswith("MOE_EP_")


@pytest.mark.parametrize(
    ("given", "default", "way_out"),
    [("", "~nobody-is-called-this/x", "set MOE"), ("~nobody-is-called-this/x", "/tmp", "unset it")],
)
def test_a_home_that_nobody_has(monkeypatch, given, default, way_out):
    monkeypatch.setenv(env.CACHE_DIR.name, given)
    with pytest.raises(
        ValueError, match=f"MOE_EP_CACHE_DIR is '~nobody-is-called-this/x'; its ~ stands for a home .*; {way_out}"
    ):
        dataclasses.replace(env.CACHE_DIR, default=default).get()


@pytest.mark.parametrize(
    ("variable", "raw", "value"),
    [
        (env.DISPATCH_TIMEOUT_S, "2.5", 2.5),
        (env.CHUNK_SIZE, "64", 64),
        (env.LOG_LEVEL, "debug", "DEBUG"),
        (env.NVSHMEM_TIMEOUT_S, "off", 0.0),
        (env.NVSHMEM_FORCE_DEVICE_API, "1", True),
        (env.NVSHMEM_NUM_SMS, "32", 32),
    ],
)
def test_values_are_parsed(monkeypatch, variable, raw, value):
    monkeypatch.setenv(variable.name, raw)
    assert variable.get() == value


@pytest.mark.parametrize(
    ("variable", "raw"),
    [
        (env.DISPATCH_TIMEOUT_S, "-1"),
        (env.DISPATCH_TIMEOUT_S, "soon"),
        (env.DISPATCH_TIMEOUT_S, "nan"),
        (env.DISPATCH_TIMEOUT_S, "1e10"),
        (env.CHUNK_SIZE, "0"),
        (env.CHUNK_SIZE, "x"),
        (env.LOG_LEVEL, "loud"),
        (env.NVSHMEM_TIMEOUT_S, "0"),
        (env.NVSHMEM_FORCE_DEVICE_API, "yes"),
    ],
)
def test_bad_values_are_named(monkeypatch, variable, raw):
    monkeypatch.setenv(variable.name, raw)
    with pytest.raises(ValueError, match=f"{variable.name} is {raw!r}; it must be .*; unset it"):
        variable.get()


def warnings_of(environ: dict[str, str]) -> str:
    code = "from moe_ep import env; env.LOG_LEVEL.get(); env.CHUNK_SIZE.get(); env.LOG_LEVEL.get()"
    clean = {name: value for name, value in os.environ.items() if not name.startswith("MOE_EP_")}
    done = subprocess.run([sys.executable, "-c", code], env=clean | environ, capture_output=True, text=True, check=True)
    return done.stderr


@pytest.mark.parametrize(
    ("mistyped", "meant"),
    [
        ("MOE_EP_LOGLEVEL", "MOE_EP_LOG_LEVEL"),
        ("MOE_EP_DISPATCH_TIMEOUT", "MOE_EP_DISPATCH_TIMEOUT_S"),
        ("MOE_EP_ALLTOALL_BACKEND", "MOE_EP_ALL2ALL_BACKEND"),
        ("MOE_EP_CHUNKSIZE", "MOE_EP_CHUNK_SIZE"),
    ],
)
def test_a_mistyped_name_is_warned_of_once(mistyped: str, meant: str) -> None:
    printed = warnings_of({mistyped: "1"})
    assert printed.count(f"{mistyped},") == 1 and f"did you mean {meant}?" in printed


def test_a_name_like_no_other_is_warned_of_too() -> None:
    printed = warnings_of({"MOE_EP_QZX": "1", "MOE_EP_CHUNK_SIZE": "5", "MOE_EPOCH": "3"})
    assert printed.count("MOE_EP_QZX") == 1 and "MOE_EPOCH" not in printed
    assert all(variable.name in printed for variable in env.ALL)


def test_names_of_launchers_and_tests_are_no_mistakes() -> None:
    others = {"MOE_EP_GANG_RANK": "0", "MOE_EP_TEST_ANYTHING": "1", "PATH_OF_MOE_EP_X": "1"}
    assert warnings_of(others | {variable.name: "" for variable in env.ALL}) == ""
