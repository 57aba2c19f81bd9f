"""All GPU tests and all measurements of docs/benchmarks, on the GPUs at hand, in the time that there is.

    python scripts/reproduce.py --list                                     # what would run, and about how long
    python scripts/reproduce.py --seconds 560 --out results                # as much as fits, the most worth first
    python scripts/reproduce.py --parts tests,gemm,dispatch --out results --vllm-library FILE
    python scripts/reproduce.py --model DIR --texts FILE --routing FILE --out results
    python scripts/reproduce.py --resume --out results                     # what has not ended well there yet

Parts of one GPU run side by side, those of several after them; tests share GPUs. Each part writes OUT/PART.log, and its
rows to OUT/PART.jsonl; how it ended goes to OUT/summary.jsonl. A part that does not fit the time is skipped, one that
takes half as long again as it is said to is ended with all its processes, and one that fails stops no other. The table
of parts is scripts/reproduce_parts.py; --parts takes their names, or what several begin with ("tests"). The status is 1
where a part failed or was ended. Needs no network; what is not installed or not given is said, and its parts left out.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import shlex
import shutil
import string
import sys
import time
from collections import Counter
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from reproduce_parts import PARTS, Part
from reproduce_schedule import ROOT, SEATS, Ended, begins, fitting, run

from moe_ep.bench.results import append_line, read_lines, table
from moe_ep.files import write_text
from moe_ep.launch.gangs.interrupts import raised_as_interrupt

# NVLink multicast stays off in whatever is started.
ENVIRONMENT = {"NVSHMEM_DISABLE_NVLS": "1", "NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}
# Files of the caller, by their option.
FILES = ("model", "texts", "prompts", "routing")
# Those without which parts measure less.
MORE_FILES = ("vllm_library",)
# Where CUDA's toolkit has its programs, if they are not on the PATH.
CUDA_PROGRAMS = "/usr/local/cuda/bin"
# As pytest -v says it, of tests one by one and of those side by side.
TEST = re.compile(r"^(?:tests/.*::.* |\[gw\d+\] .*\] )(PASSED|FAILED|ERROR|SKIPPED)\b", re.MULTILINE)
# Tests of one part that run side by side: what they compute on the host takes longer than what they do on the GPU.
WORKERS = 4
# Lines of a log that the summary shows at most.
SHOWN_LINES = 8


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gpus", type=int, help="how many to use; all that CUDA_VISIBLE_DEVICES or the machine has")
    parser.add_argument("--seconds", type=float, default=1800, help="for everything (1800)")
    parser.add_argument("--out", type=Path, default=Path("reproduced"), help="folder of logs and rows (reproduced)")
    parser.add_argument("--parts", help="names, or what they begin with, with commas; all")
    parser.add_argument(
        "--resume", action="store_true", help="leave out what ended well according to OUT/summary.jsonl"
    )
    parser.add_argument("--list", action="store_true", help="show what would run, and end")
    parser.add_argument("--model", type=Path, help="checkpoint, for perplexity, generate-text and run")
    parser.add_argument("--texts", type=Path, help="JSON object of lists of strings, for perplexity and run")
    parser.add_argument("--prompts", type=Path, help="prompts, for generate-text")
    parser.add_argument("--routing", type=Path, help="recorded choices (.npz), for scaling and replica-rules")
    parser.add_argument(
        "--vllm-library", type=Path, help="vLLM's _moe_C_stable_libtorch.abi3.so, or that as .xz, for gemm"
    )
    parser.add_argument("--commit", help="what to record where this is no git checkout")
    args = parser.parse_args(argv)
    if not args.seconds > 0:
        parser.error(f"--seconds is {args.seconds:g}; it must be a number above 0")
    for name in ("out", *FILES, *MORE_FILES):
        path = getattr(args, name)
        if path is not None and name != "out" and not path.exists():
            parser.error(f"--{name.replace('_', '-')} is '{path}'; it must be there, and is not")
        if path is not None:
            setattr(args, name, path.resolve())
    return args


def visible_gpus(number: int | None) -> list[str]:
    """The GPUs to use, as CUDA_VISIBLE_DEVICES names them.

    Raises:
        SystemExit: there are fewer.
    """
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named is not None:
        there = [name for name in named.split(",") if name]
    else:
        import torch

        there = [str(index) for index in range(torch.cuda.device_count())]
    if number is not None and not 0 < number <= len(there):
        raise SystemExit(
            f"--gpus {number}: there are {len(there)}; give as many or fewer, or --list to see what would run"
        )
    return there[:number]


def chosen(names: str | None) -> list[Part]:
    """The parts that `names` name or begin, in order of worth.

    Raises:
        SystemExit: no part begins so.
    """
    wanted = [name.strip() for name in names.split(",")] if names is not None else [""]
    for name in wanted:
        if not any(part.name.startswith(name) for part in PARTS):
            raise SystemExit(f"--parts {name}: no part is named so; there are {', '.join(part.name for part in PARTS)}")
    exact = {part.name for part in PARTS}
    return [
        part
        for part in PARTS
        if any(part.name == name if name in exact else part.name.startswith(name) for name in wanted)
    ]


def is_installed(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


def lacks(part: Part, args: argparse.Namespace, num_gpus: int) -> list[str]:
    """Why the part cannot run here."""
    reasons = [f"it takes {part.gpus} GPUs of {num_gpus}"] if part.gpus > num_gpus else []
    fields = {field for command in part.commands for _, field, _, _ in string.Formatter().parse(command)}
    reasons += [f"--{name} was not given" for name in FILES if name in fields and getattr(args, name) is None]
    for need in part.needs:
        if "-" in need:
            path = f"{os.environ.get('PATH', '')}:{CUDA_PROGRAMS}"
            reasons += [f"{need} is not on the PATH"] if shutil.which(need, path=path) is None else []
        elif not is_installed(need):
            reasons.append(f"{need} is not installed")
    return reasons


def ended_well(out: Path) -> set[str]:
    """The parts that did, the last time that they ran."""
    summary = out / "summary.jsonl"
    codes = {row["part"]: row["rc"] for row in read_lines(summary)} if summary.exists() else {}
    return {name for name, rc in codes.items() if rc == 0}


def peers(args: argparse.Namespace) -> list[str]:
    """The libraries that gemm can be measured beside."""
    there = ["humming"] if is_installed("humming") else []
    return [*there, *(["vllm"] if args.vllm_library else []), "torch"]


def begin(args: argparse.Namespace, part: Part, limit_s: float) -> list[str]:
    """The commands of a part that begins, whose rows of an earlier run go."""
    (args.out / f"{part.name}.jsonl").unlink(missing_ok=True)
    return commands_of(args, part, limit_s)


def commands_of(args: argparse.Namespace, part: Part, limit_s: float) -> list[str]:
    """Its shell commands, with this machine's values in them."""
    python = shlex.quote(sys.executable)
    rows = args.out / f"{part.name}.jsonl"
    pytest = f"{python} -m pytest -o addopts=--import-mode=importlib -v --tb=short -p no:cacheprovider"
    threads = max(1, (os.cpu_count() or 1) // ((args.gpus or 1) * SEATS * WORKERS))
    library = f" --vllm-library {shlex.quote(str(args.vllm_library))}" if args.vllm_library else ""
    values = {
        "python": python,
        "torchrun": f"{python} -m torch.distributed.run --standalone --nproc-per-node {part.gpus}",
        "moe_ep": f"{python} -m moe_ep.launch",
        "gpus": part.gpus,
        "rows": shlex.quote(str(rows.relative_to(ROOT) if rows.is_relative_to(ROOT) else rows)),
        # What begins and ends a command is not counted by the command.
        "left": max(5, int(limit_s) - 15),
        "commit": f"--commit {shlex.quote(args.commit)}" if args.commit else "",
        "peers": " ".join(peers(args)) + library,
        "pytest": pytest,
        "pytests": f"OMP_NUM_THREADS={threads} {pytest} -n {WORKERS}" if is_installed("xdist") else pytest,
        "recorded": f",{shlex.quote(str(args.routing))}" if args.routing else "",
        **{name: shlex.quote(str(getattr(args, name))) for name in FILES},
    }
    return [command.format(**values) for command in part.commands]


def show_plan(parts: list[Part], left_out: dict[str, str], num_gpus: int) -> None:
    """What runs and when, then what does not and why."""
    rows = [
        {"part": part.name, "gpus": part.gpus, "begins": float(begin), "seconds": part.seconds, "page": part.page}
        for part, begin in begins(parts, num_gpus)
    ]
    titles = {"part": "part", "gpus": "GPUs", "begins": "begins about, s", "seconds": "takes about, s", "page": "feeds"}
    print(table(rows, titles))
    for name, reason in left_out.items():
        print(f"left out: {name}: {reason}")


def results(ended: Ended, part: Part, args: argparse.Namespace) -> dict[str, Any]:
    """How the part ended, with its tests and headlines.

    JSON lines of its log become its rows where it wrote none; the commands in them lose this machine's folders.
    """
    log = (args.out / f"{part.name}.log").read_text(encoding="utf-8", errors="replace")
    rows = args.out / f"{part.name}.jsonl"
    printed = "".join(f"{line}\n" for line in log.splitlines() if line.startswith("{") and line.endswith("}"))
    written = rows.read_text(encoding="utf-8") if rows.exists() else printed
    for given in (args.out / "rows", *filter(None, (getattr(args, name) for name in (*FILES, *MORE_FILES)))):
        written = written.replace(f"{given.parent}{os.sep}", "")
    if written:
        write_text(rows, written)
    tests = Counter(outcome.lower() for outcome in TEST.findall(log))
    found = [line for line in log.splitlines() if part.headline and re.search(part.headline, line)]
    return asdict(ended) | {
        "tests": dict(tests),
        "rows": len(written.splitlines()),
        "headlines": found[-SHOWN_LINES:],
        "page": part.page,
        "gpus": part.gpus,
    }


def show_results(found: list[dict[str, Any]]) -> None:
    """A row for each part, then their headlines."""
    rows = [
        row
        | {
            "seconds": float(row["seconds"]),
            "how": "ended, too long" if row["outlasted"] else "well" if row["rc"] == 0 else "failed",
            "tests": ", ".join(f"{number} {outcome}" for outcome, number in row["tests"].items()) or "-",
        }
        for row in found
    ]
    titles = {
        "part": "part",
        "gpus": "GPUs",
        "how": "went",
        "rc": "rc",
        "seconds": "s",
        "rows": "rows",
        "tests": "tests",
    }
    print(table(rows, titles))
    for row in found:
        for line in row["headlines"]:
            print(f"{row['part']}: {line}")


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    parts = chosen(args.parts)
    gpus = [str(index) for index in range(args.gpus)] if args.list and args.gpus else visible_gpus(args.gpus)
    args.gpus = len(gpus)
    widened = [replace(part, gpus=max(part.gpus, len(gpus))) if part.widens else part for part in parts]
    left_out = {part.name: "; ".join(why) for part in widened if (why := lacks(part, args, len(gpus)))}
    if args.resume:
        left_out |= dict.fromkeys(ended_well(args.out) & {part.name for part in parts}, "it has ended well")
    able = [part for part in widened if part.name not in left_out]
    fits = fitting(able, len(gpus), args.seconds)
    late = f"it does not fit the {args.seconds:.0f} s"
    left_out |= {part.name: late for part in able if part not in fits}
    show_plan(fits, left_out, len(gpus))
    if any(part.name == "gemm" for part in fits):
        print(f"gemm: beside {', '.join(peers(args))}")
    if args.list or not fits:
        return 0
    try:
        args.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SystemExit(
            f"--out is '{args.out}'; no such folder can be made ({error.strerror}); give another"
        ) from None
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    env = os.environ | ENVIRONMENT | {"PYTHONPATH": os.pathsep.join(paths), "PYTHONUNBUFFERED": "1"}
    began = time.monotonic()

    def say(text: str) -> None:
        print(f"{time.monotonic() - began:6.1f} s  {text}", flush=True)

    found, by_name = [], {part.name: part for part in fits}
    try:
        with raised_as_interrupt():
            for ended in run(fits, gpus, args.seconds, args.out, partial(begin, args), env, say):
                row = results(ended, by_name[ended.part], args)
                say(f"ends {ended.part}: {'it took too long' if ended.outlasted else f'rc {ended.rc}'}")
                append_line(args.out / "summary.jsonl", row)
                found.append(row)
    except KeyboardInterrupt:
        say("interrupted")
        show_results(found)
        return 130
    show_results(found)
    return int(any(row["rc"] for row in found))


if __name__ == "__main__":
    sys.exit(main())
