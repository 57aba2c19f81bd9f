"""moe-ep completion: prints a shell script that completes commands and options."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Iterator

from moe_ep.launch.cli.options import Parser, add_command
from moe_ep.launch.cli.outputs import show

# Words after a command complete as its subcommands and options; anything else as a file.
_BASH = """_moe_ep() {
  local word path="moe-ep"
  for word in "${COMP_WORDS[@]:1:COMP_CWORD-1}"; do
    case " $(_moe_ep_words "$path") " in *" $word "*) [[ $word == -* ]] || path="$path $word" ;; esac
  done
  COMPREPLY=($(compgen -W "$(_moe_ep_words "$path")" -- "${COMP_WORDS[COMP_CWORD]}"))
}
complete -o default -F _moe_ep moe-ep
"""
_ZSH = "autoload -U +X compinit bashcompinit && compinit -u && bashcompinit\n"


def add_parser(subparsers: argparse._SubParsersAction[Parser]) -> None:
    parser = add_command(
        subparsers, "completion", main, None, "print the completion of commands and options for a shell",
        'Prints a script for the shell: eval "$(moe-ep completion bash)" in ~/.bashrc, or zsh in ~/.zshrc; '
        "moe-ep completion fish | source in config.fish.",
    )  # fmt: skip
    parser.add_argument("shell", metavar="SHELL", choices=("bash", "zsh", "fish"), help="bash, zsh or fish")


def main(args: argparse.Namespace) -> int:
    words = dict(_words(args.parser, "moe-ep"))
    if args.shell == "fish":
        show("\n".join(_fish(words)))
        return 0
    cases = "".join(
        f"    {shlex.quote(path)}) echo {shlex.quote(' '.join(found))} ;;\n" for path, found in words.items()
    )
    script = f'_moe_ep_words() {{\n  case "$1" in\n{cases}  esac\n}}\n{_BASH}'
    show((_ZSH if args.shell == "zsh" else "") + script, end="")
    return 0


def _words(parser: argparse.ArgumentParser, path: str) -> Iterator[tuple[str, list[str]]]:
    """(command, subcommands and options) of a parser and all below it."""
    flags = [flag for action in parser._actions for flag in action.option_strings if flag.startswith("--")]
    below = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    yield path, [name for action in below for name in action.choices] + flags
    for action in below:
        for name, child in action.choices.items():
            yield from _words(child, f"{path} {name}")


def _fish(words: dict[str, list[str]]) -> Iterator[str]:
    for path, found in words.items():
        _, *commands = path.split()
        seen = " ".join(f"; and __fish_seen_subcommand_from {command}" for command in commands)
        subcommands = [word for word in found if not word.startswith("-")]
        for word in found:
            if word.startswith("-"):
                yield f"complete -c moe-ep -n 'true{seen}' -l {word.removeprefix('--')}"
            else:
                unseen = f"not __fish_seen_subcommand_from {' '.join(subcommands)}"
                yield f"complete -c moe-ep -f -n '{unseen}{seen}' -a {word}"
