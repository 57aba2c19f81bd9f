"""Every command that README and docs show is one that the command line and the scripts take."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from moe_ep.launch.cli import make_parser

ROOT = Path(__file__).parents[2]
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), *sorted((ROOT / "docs" / "deploy").iterdir()))
# What starts our own command line, whatever launches it.
OURS = re.compile(
    r"(?:^|[\s`])(?:moe-ep|(?:-m )moe_ep\.launch|launch/ray_job\.py \S+|scripts/bench_ep_scaling\.py)(?= [a-z-])"
)
SCRIPT = re.compile(r"(?:^|[\s`])scripts/(\w+\.py)([^`|]*)")


def lines() -> Iterator[str]:
    """Lines of code blocks and pieces of inline code, those ending in a backslash joined with the next."""
    for page in PAGES:
        text = page.read_text().replace("\\\n", " ")
        if page.suffix != ".md":
            yield from text.splitlines()
            continue
        fences = re.findall(r"^```\w*\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
        for block in fences:
            yield from block.splitlines()
        without = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
        yield from (" ".join(code.split()) for code in re.findall(r"`([^`]+)`", without))


def our_commands() -> list[str]:
    found = set()
    for line in lines():
        if match := OURS.search(line):
            prefix = "bench scaling " if "bench_ep_scaling" in match.group() else ""
            found.add(prefix + re.split(r"\s#|\s{2,}[a-z]|[\[…]|\.\.\. |;", line[match.end() :])[0].strip())
    return sorted(found)


@pytest.mark.parametrize("command", our_commands())
def test_moe_ep_takes_it(command: str) -> None:
    words = [word for word in shlex.split(command) if word not in ("$@", "...", "--help")]
    if len(words) > 1:  # else a command is only named
        make_parser().parse_args(words)


def test_every_command_is_shown() -> None:
    shown = {command.split()[0] for command in our_commands()}
    (commands,) = (action for action in make_parser()._actions if action.dest == "command")
    assert shown == set(commands.choices or ())


def test_scripts_take_their_flags() -> None:
    wrong = []
    for line in lines():
        for name, rest in SCRIPT.findall(line):
            script = ROOT / "scripts" / name
            source = script.read_text() if script.exists() else ""
            wrong += [name] if not source else []
            for flag in re.findall(r"--([a-z][a-z-]+)", rest) if name != "bench_ep_scaling.py" else ():
                if f"--{flag}" not in source and flag.replace("-", "_") not in source:
                    wrong.append(f"{name} --{flag}")
    assert not wrong
