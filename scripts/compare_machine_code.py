"""Compiles every build of every CUDA kernel, without a GPU, and compares the machine code of two commits.

A change of names, comments or files must not change what the GPU executes. `record` writes a digest of the code of each
build: its instructions, register count, shared memory, constants and the compiler's attributes. `compare` prints the
builds whose digests differ and ends with 1 if any do.

    python scripts/compare_machine_code.py record before.json      # at the one commit
    python scripts/compare_machine_code.py record after.json       # at the other, with the same NVRTC
    python scripts/compare_machine_code.py compare before.json after.json

`--only REGEX` restricts `record` to builds whose names match, `--quick` to one in about ten that has every source and
every number type. Builds with NVSHMEM's device library are compiled where its wheel is installed, and not linked.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import re
import struct
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import torch

from moe_ep.activation import MoEActivation
from moe_ep.dispatch.nvshmem import batch_exchange, high_throughput, kernels, low_latency
from moe_ep.dispatch.nvshmem.low_latency import BatchLayout
from moe_ep.kernels import align, batch_plan, eplb_map, jit
from moe_ep.kernels.marlin import ampere, eight_bit, hopper
from moe_ep.kernels.marlin.types import WEIGHT_TYPES, WeightType
from moe_ep.quantization.input_rows import INPUT_DTYPES
from moe_ep.scalar_type import scalar_types

_ACT_DTYPES = (torch.bfloat16, torch.float16)
_INTEGERS = (torch.int32, torch.int64)
_GROUPS = {
    scalar_types.uint4: (-1, 32, 64, 128, 0),
    scalar_types.uint4b8: (-1, 32, 64, 128, 0),
    scalar_types.uint8b128: (-1, 32, 64, 128, 0),
    scalar_types.float8_e4m3fn: (-1, 32, 128),
}
# K, top-k, ranks: DeepSeek-V3 on one host, GPT-OSS, odd sizes, one rank.
_BATCHES = ((7168, 8, 8), (2880, 4, 4), (2000, 32, 3), (2048, 1, 1), (4096, 6, 16))
_CLUSTERS = (1, 8)
_EIGHT_BIT_PAIRS = [(dtype, kind) for dtype, kinds in INPUT_DTYPES.items() for kind in kinds]
_LIMIT = 10.0
# Of the attributes in .nv.info: the form whose bytes follow, and EIATTR_PARAM_CBANK (symbol, offset, size).
_SIZED, _PARAM_CBANK = 4, 0x0A

Build = tuple[str, jit.KernelSource, str, bool]  # name, source, architecture, part of --quick


def builds() -> Iterator[Build]:
    """Every build of which the package may ask for: each number type and spacing of scales with each dtype, each
    activation with one number type, each shape of a batch that takes another path."""
    yield from _experts()
    yield from _dispatch()
    for arch, ids, blocks in itertools.product(("sm_80", "sm_90a"), _INTEGERS, _CLUSTERS):
        if blocks == 1 or arch == "sm_90a":
            yield f"align {_short(ids)} {blocks}", align.kernel_source(ids, blocks), arch, ids == torch.int32
    for arch, kinds, slots in itertools.product(("sm_80", "sm_90a"), itertools.product(_INTEGERS, repeat=3), (1, 2)):
        name = f"eplb_map {' '.join(map(_short, kinds))} {slots}"
        yield name, eplb_map.kernel_source(*kinds, slots), arch, len(set(kinds)) == 1
    scripts = Path(__file__).parent
    yield "step_clock", jit.KernelSource(scripts / "step_clock.cu", "step_stamp", (("WARP", "32"),)), "sm_90a", True
    planted = jit.KernelSource(scripts / "sanitize_planted.cu", "planted", (("THREADS", "256"),))
    yield "sanitize_planted", planted, "sm_90a", True
    sizes = {"HIDDEN": 2048, "TOPK": 8, "RANKS": 2, "CAPACITY": 64, "EXPERTS": 64, "STEPS": 4, "TOKENS": "1,7,64"}
    defines = tuple((name, str(value)) for name, value in sizes.items())
    yield "soak", jit.KernelSource(scripts / "soak_nvshmem.cu", "soak_make", defines), "sm_90a", True


def _experts() -> Iterator[Build]:
    silu = MoEActivation.SILU
    for kind, scale_dtype, groups, act in _number_types():
        name = f"{kind.scalar_type} {_short(scale_dtype)} {_short(act)}"
        first = act == torch.bfloat16 and groups == _groups_of(kind, scale_dtype)[0]
        if groups != 0:
            per_step = 1 if groups == -1 else 128 // groups
            for decode, tall in ((True, False), (False, False), (False, True)):
                source = hopper.kernel_source(kind, act, scale_dtype, per_step, silu, decode, tall)
                if not tall or dict(source.defines)["TALL"] == "1":
                    entry = f"{'decode' if decode else 'prefill'}{' tall' if tall else ''}"
                    if groups != 128:  # as -1
                        yield f"{entry} {name} {per_step}", source, "sm_90a", first or groups == 64
            if act == torch.bfloat16 and groups != 128:
                source = hopper.kernel_source(kind, act, scale_dtype, per_step, silu, False, arrivals=True)
                yield f"arriving {name} {per_step}", source, "sm_90a", first
        for phase, tokens in itertools.product((0, 1), (16, 32, 64)):
            source = ampere.kernel_source(kind, act, scale_dtype, groups, phase, silu, tokens)
            is_quick = tokens == 32 and (first or groups == 0) and phase == (groups == 0)
            yield f"ampere {name} {groups} w{(13, 2)[phase]} {tokens}", source, "sm_80", is_quick
            if groups == 0:
                yield f"ampere {name} {groups} w{(13, 2)[phase]} {tokens}", source, "sm_90a", False
    e4m3, uint4b8 = (WEIGHT_TYPES[kind.id] for kind in (scalar_types.float8_e4m3fn, scalar_types.uint4b8))
    mxfp4, fp4 = WEIGHT_TYPES[scalar_types.float4_e2m1f.id], (torch.bfloat16, torch.uint8)
    for activation, limit in itertools.product(MoEActivation, (None, _LIMIT)):
        if limit is not None and (not activation.is_gated or activation == MoEActivation.SITU):
            continue  # they take none
        name = f"{activation.value} {limit}"
        is_quick = activation == MoEActivation.SWIGLUOAI
        for decode in (True, False):
            source = hopper.kernel_source(mxfp4, *fp4, 4, activation, decode, clamp_limit=limit)
            yield f"{'decode' if decode else 'prefill'} mxfp4 {name}", source, "sm_90a", is_quick
        yield f"ampere mxfp4 {name}", ampere.kernel_source(mxfp4, *fp4, 32, 0, activation, 32, limit), "sm_80", is_quick
        for act in _ACT_DTYPES if activation.is_gated else ():
            for input_dtype, kind in ((torch.float8_e4m3fn, e4m3), (torch.int8, uint4b8)):
                for part, source in eight_bit.kernel_sources(kind, input_dtype, act, 1, activation, limit).items():
                    if part == "experts" or activation == silu:
                        chosen = limit is None and (is_quick or part == "rows")
                        yield f"{_short(input_dtype)} {part} {name} {_short(act)}", source, "sm_90a", chosen
    for (input_dtype, scalar_type), sent, older in itertools.product(_EIGHT_BIT_PAIRS, (False, True), (False, True)):
        kind = WEIGHT_TYPES[scalar_type.id]
        for groups in (4,) if scalar_type == scalar_types.float4_e2m1f else (0, 1, 4):
            if older and input_dtype != torch.int8:
                continue
            numbers = (kind, input_dtype, torch.bfloat16, groups, silu)
            for part, source in eight_bit.kernel_sources(*numbers, sent=sent, older=older).items():
                name = f"{_short(input_dtype)} {part} {kind.scalar_type} {groups} sent={sent:d}"
                yield name, source, "sm_80" if older else "sm_90a", groups == 4 and not sent
    for phase in (0, 1):
        yield f"ampere gather w{(13, 2)[phase]}", ampere.gather_source(phase), "sm_80", True


def _number_types() -> Iterator[tuple[WeightType, torch.dtype, int, torch.dtype]]:
    """Number type, scales' dtype, columns of a group (-1: all, 0: each column's is looked up), activations' dtype."""
    for act in _ACT_DTYPES:
        kinds = [(WEIGHT_TYPES[kind.id], act) for kind in _GROUPS]
        fp4 = WEIGHT_TYPES[scalar_types.float4_e2m1f.id]
        for kind, scale_dtype in (*kinds, (fp4, torch.float8_e4m3fn), (fp4, torch.uint8)):
            for groups in _groups_of(kind, scale_dtype):
                yield kind, scale_dtype, groups, act


def _groups_of(kind: WeightType, scale_dtype: torch.dtype) -> tuple[int, ...]:
    if kind.scalar_type == scalar_types.float4_e2m1f:
        return (16,) if scale_dtype == torch.float8_e4m3fn else (32,)
    return _GROUPS[kind.scalar_type]


def _dispatch() -> Iterator[Build]:
    sizes = {"capacity": 64}
    codes = (None, torch.float8_e4m3fn, torch.int8)
    for (hidden, topk, ranks), code_dtype, act in itertools.product(_BATCHES, codes, _ACT_DTYPES):
        if act == torch.float16 and ranks not in (3, 8):
            continue
        names = {"hidden_size": hidden, "topk": topk, "num_ranks": ranks, "code_dtype": code_dtype}
        small, large = BatchLayout(**names, **sizes), high_throughput.Layout(**names, **sizes)
        for device_api in (False, True) if _has_device_library() else (False,):
            small, large = replace(small, device_api=device_api), replace(large, device_api=device_api)
            label = (
                f"{hidden} {topk} {ranks} {code_dtype and _short(code_dtype)} {_short(act)} device_api={device_api:d}"
            )
            named = [
                *((name, kernels.kernel_source(name, small, act)) for name in low_latency.KERNELS),
                *(
                    (f"high_throughput_{name}", high_throughput.kernel_source(name, large, act))
                    for name in (large.kernels if act == torch.bfloat16 else high_throughput.KERNELS)
                ),
            ]
            if not device_api:
                slots = kernels.kernel_source("low_latency_combine", replace(small, slot_results=True), act)
                named.append(("slots_low_latency_combine", slots))
            for arch, (name, source) in itertools.product(("sm_80", "sm_90a"), named):
                if arch == "sm_80" and (device_api or ranks not in (3, 8)):
                    continue
                is_quick = ranks == (3 if arch == "sm_80" else 8) and (code_dtype == torch.float8_e4m3fn) == (
                    act == torch.float16
                )
                yield f"{name} {label}", source, arch, is_quick
            if code_dtype is None and act == torch.bfloat16 and not device_api:
                overlapped = replace(large, overlaps=True)
                for name in overlapped.kernels:
                    source = high_throughput.kernel_source(name, overlapped, act)
                    yield f"overlapped_{name} {label}", source, "sm_90a", ranks == 8
    for arch in ("sm_80", "sm_90a"):
        for name in batch_exchange.THREADS:
            yield name, batch_exchange.kernel_source(name, 8, 257), arch, True
        yield "batch_plan", batch_plan.plan_source(256, 288, 32, 2), arch, True
        yield "batch_rows", batch_plan.rows_source(257, 8, torch.int64), arch, True


def _has_device_library() -> bool:
    try:
        kernels.device_archive()
    except ImportError:
        return False
    return True


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


# ---- machine code ----


def digest(source: jit.KernelSource, arch: str) -> dict[str, str]:
    """Digests of all that decides what one kernel does, by section of the cubin."""
    return digest_of_cubin(bytes(jit.object_code(source, arch).code), source.entry)


def digest_of_cubin(cubin: bytes, entry: str) -> dict[str, str]:
    """The same of an ELF file; the kernel's own name, other symbols' names and their order are left out."""
    header = struct.unpack_from("<16sHHIQQQIHHHHHH", cubin)
    table, size, count, names_index = header[6], header[11], header[12], header[13]
    raw = [struct.unpack_from("<IIQQQQIIQQ", cubin, table + i * size) for i in range(count)]
    texts = [b"" if section[1] == 8 else cubin[section[4] : section[4] + section[5]] for section in raw]
    names = [_text_at(texts[names_index], section[0]) for section in raw]
    found = {}
    for section, name, text in zip(raw, names, texts, strict=True):
        kept = name.replace(entry, "ENTRY")
        if name.startswith(".text."):
            found[kept] = _hash(text, section[7] >> 24)  # sh_info: registers
        elif name.startswith(".nv.shared."):
            found[kept] = f"{section[5]} bytes"
        elif name.startswith(".nv.info."):
            found[kept] = _hash(_attributes(text), 0)
        elif re.match(r"\.nv\.constant[0-35-9]", name):
            found[kept] = _hash(text, 0)
        elif name.startswith(".rela.text.") and text:
            found[kept] = _hash(_relocations(text, section[6], raw, texts), 0)
    return found


def _attributes(text: bytes) -> bytes:
    """A kernel's attributes without the index of the symbol of its parameters, which other symbols move."""
    kept, at = b"", 0
    while at < len(text):
        form, attribute, value = struct.unpack_from("<BBH", text, at)
        size = value if form == _SIZED else 0
        skipped = 4 if attribute == _PARAM_CBANK else 0
        kept += text[at : at + 4] + text[at + 4 + skipped : at + 4 + size]
        at += 4 + size
    return kept


def _relocations(text: bytes, symbols: int, raw: list[tuple[int, ...]], texts: list[bytes]) -> bytes:
    """Places and kinds of relocations, with what they point to: a function's name, or the first bytes of a number."""
    strings, lines = texts[raw[symbols][6]], []
    for at in range(0, len(text), 24):
        offset, info, addend = struct.unpack_from("<QQq", text, at)
        name, kind, _, index, value, size = struct.unpack_from("<IBBHQQ", texts[symbols], (info >> 32) * 24)
        is_number = kind & 15 == 1 and index < len(texts)
        target = texts[index][value : value + size].hex() if is_number else _text_at(strings, name)
        lines.append(f"{offset} {info & 0xFFFFFFFF} {addend} {target}")
    return "\n".join(lines).encode()


def _text_at(strings: bytes, at: int) -> str:
    return strings[at : strings.index(b"\0", at)].decode()


def _hash(data: bytes, number: int) -> str:
    return hashlib.sha256(data + number.to_bytes(4, "little")).hexdigest()[:16] + f" {len(data)} bytes"


def record(path: Path, only: str, quick: bool, jobs: int) -> None:
    """Writes the digests of the selected builds."""
    import cuda.core  # noqa: F401 - here, since threads must not import it at the same time

    chosen = [build for build in builds() if re.search(only, f"{build[0]} {build[2]}") and (build[3] or not quick)]
    chosen.sort(key=lambda build: not build[3])  # quick ones first: the file is written as it grows
    with ThreadPoolExecutor(jobs) as pool:
        digests = pool.map(lambda build: digest(build[1], build[2]), chosen)
        found = {}
        for number, ((name, _, arch, _), each) in enumerate(zip(chosen, digests, strict=True), 1):
            found[f"{name} {arch}"] = each
            if number % 20 == 0 or number == len(chosen):
                path.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n")
            print(f"\r{number} of {len(chosen)}", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)


def compare(before: Path, after: Path) -> bool:
    """Prints the builds that differ; whether there are none. Builds that only one file has are counted apart."""
    old, new = json.loads(before.read_text()), json.loads(after.read_text())
    both = sorted(old.keys() & new.keys())
    differing = [name for name in both if old[name] != new[name]]
    for name in differing:
        sections = [
            key for key in sorted(old[name].keys() | new[name].keys()) if old[name].get(key) != new[name].get(key)
        ]
        print(f"{name}: {', '.join(f'{key} ({old[name].get(key)} -> {new[name].get(key)})' for key in sections)}")
    alone = len(old.keys() ^ new.keys())
    print(f"{len(both) - len(differing)} of {len(both)} builds are the same; {alone} are in one file only")
    return not differing


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    recorder = commands.add_parser("record")
    recorder.add_argument("path", type=Path)
    recorder.add_argument("--only", default="", help="regular expression of builds' names")
    recorder.add_argument("--quick", action="store_true")
    recorder.add_argument("--jobs", type=int, default=2)
    comparer = commands.add_parser("compare")
    comparer.add_argument("before", type=Path)
    comparer.add_argument("after", type=Path)
    arguments = parser.parse_args()
    if arguments.command == "record":
        record(arguments.path, arguments.only, arguments.quick, arguments.jobs)
        return 0
    return 0 if compare(arguments.before, arguments.after) else 1


if __name__ == "__main__":
    sys.exit(main())
