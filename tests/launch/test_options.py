"""Flags made of a dataclass: what help says of them, and the values they take."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from moe_ep.env import at_least, number, one_of
from moe_ep.launch.cli import main as cli
from moe_ep.launch.cli.options import (
    OptionError,
    Parser,
    add_flags,
    check_apart,
    endpoint,
    from_args,
    new_folder,
    option,
    output_file,
    port,
    whole_numbers,
)


@dataclass(frozen=True, kw_only=True)
class Made:
    """Flags of every kind."""

    count: int = option(1, at_least(1), "a count")
    counts: tuple[int, ...] = option((1, 2), whole_numbers, "counts")
    share: float = option(0.5, number("a share", lambda share: share < 1), "a share")
    kind: str | None = option(None, one_of("a", "b"), "a kind")
    folder: Path | None = option(None, new_folder, "a folder", "DIR")
    quick: bool = option(True, None, "whether to hurry")


def test_help_says_what_a_flag_takes_and_what_it_is_without() -> None:
    parser = Parser(prog="made")
    add_flags(parser, Made)
    said = " ".join(parser.format_help().split("options:")[1].split())
    assert said.removeprefix("-h, --help show this help message and exit ") == (
        "--count N a count (default: 1) --counts N,N counts (default: 1,2) --share X a share (default: 0.5) "
        "--kind NAME a kind --folder DIR a folder --quick, --no-quick whether to hurry (default: yes)"
    )
    made = from_args(Made, parser.parse_args(["--counts", "4,8", "--no-quick"]))
    assert made == Made(counts=(4, 8), quick=False)
    for raw in ("1", "nan", "inf", "half"):
        with pytest.raises(OptionError, match=f"--share is '{raw}'; it must be a share"):
            from_args(Made, parser.parse_args(["--share", raw]))


def test_the_least_values_are_values() -> None:
    assert at_least(2)("2") == 2 and endpoint("host:1") == "host:1" and port("65535") == 65535
    for parse, raw in ((at_least(2), "1"), (endpoint, "host:0"), (port, "0"), (port, "9" * 5000)):
        with pytest.raises(ValueError, match="it must be|it must read"):
            parse(raw)


@pytest.mark.parametrize(
    ("flag", "raw", "rule"),
    [
        ("count", str(2**31), "; it must be at most 2147483647"),
        ("count", "9" * 5000, "; it must be at most 2147483647"),
        ("counts", f"1,{2**31}", "; it must be at most 2147483647"),
        ("folder", "n" * 300, ", which cannot be used: File name too long"),
        (
            "folder",
            "~nobody-has-this-name/x",
            "; its ~ stands for a home folder, and there is none; write the path out",
        ),
    ],
)
def test_what_no_machine_can_take_is_refused(flag: str, raw: str, rule: str) -> None:
    parser = Parser(prog="made")
    add_flags(parser, Made)
    assert at_least(1)("0" * 20 + str(2**31 - 1)) == 2**31 - 1
    with pytest.raises(OptionError) as caught:
        from_args(Made, parser.parse_args([f"--{flag}", raw]))
    assert str(caught.value) == f"--{flag} is {raw!r}{rule}"


def test_links_that_lead_nowhere(tmp_path: Path) -> None:
    for name, leads_to in (("new", "made"), ("lost", "no folder/made"), ("round", "round"), ("old", "there")):
        (tmp_path / name).symlink_to(leads_to)
    (tmp_path / "there").touch()
    for name in ("new", "old"):
        assert output_file(str(tmp_path / name)) == tmp_path / name
    for parse, names in ((output_file, ("lost", "round")), (new_folder, ("new", "lost", "round", "old"))):
        for name in names:
            with pytest.raises(ValueError, match="it must be a fi|it must be a fo"):
                parse(str(tmp_path / name))


def test_no_output_takes_the_place_of_another_file(tmp_path: Path) -> None:
    read, other, link = (tmp_path / name for name in ("read", "other", "link"))
    read.touch()
    link.symlink_to("read")
    check_apart({"--a": other, "--b": None, "--c": Path("/dev/null"), "--d": Path("/dev/null")}, {"--in": read})
    for outputs, said in (({"--a": link}, f"--a is '{link}', as is --in"), ({"--a": other, "--b": other}, "as is --a")):
        with pytest.raises(OptionError, match=f"{said}; it would be replaced, write to another file"):
            check_apart(outputs, {"--in": read})


@pytest.mark.parametrize(
    ("named", "said"),
    [([], "without --record-routing; name a file"), (["--record-routing", "trace.npz"], "name a file that is no .npz")],
)
def test_weights_need_a_file_that_holds_them(
    named: list[str], said: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["run", "--record-routed-weights", *named]) == 2
    message = capsys.readouterr().err
    assert "--record-routed-weights is given with" in message and said in message


def test_commands_keep_their_inputs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = str(tmp_path / "file.npz")
    Path(file).write_text("kept")
    for command in (
        f"run --text {file} --json {file}",
        f"run --json {file} --record-routing {file}",
        f"run --eplb --load-placement {file} --json {file}",
        f"run --routing recorded:{file} --record-routing {file}",
        f"generate --prompts {file} --output {file}",
        f"bench scaling --routing {file} --json {file}",
        f"plan --measured {file} --json {file}",
        f"eplb simulate --routing {file} --json {file}",
    ):
        assert cli.main(command.split()) == 2
        assert "it would be replaced" in capsys.readouterr().err
    assert Path(file).read_text() == "kept"
