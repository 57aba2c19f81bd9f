"""moe-ep doctor: shows what this machine has, which backends and experts run on it, and how to fix the others."""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import json
import os
import platform
from pathlib import Path
from typing import Any

import moe_ep
from moe_ep import env
from moe_ep.launch.cli.options import Parser, add_command
from moe_ep.launch.cli.outputs import show
from moe_ep.launch.gangs.gang import num_cpus

_PACKAGES = (
    "torch", "ray", "triton", "nccl", "nvshmem", "nvshmem4py", "cuda-core", "cuda-bindings", "safetensors",
    "tokenizers", "transformers",
)  # fmt: skip
# The distributions that may provide a package, without the CUDA version in their names.
_DISTRIBUTIONS = {"nccl": "nvidia-nccl-cu", "nvshmem": "nvidia-nvshmem-cu", "nvshmem4py": "nvshmem4py-cu"}
_FIXES = {
    "torch": "pip install torch",
    "ray": "pip install 'ray[default]'",
    "nccl": "it comes with torch's CUDA build",
    "transformers": "pip install 'moe_ep[hf]'",
}


def add_parser(subparsers: argparse._SubParsersAction[Parser]) -> None:
    parser = add_command(
        subparsers, "doctor", main, None, "show what runs on this machine, and how to fix the rest",
        "Prints GPUs, links, versions, and for every backend whether it runs here or what would fix it.",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print one JSON object instead")


def main(args: argparse.Namespace) -> int:
    findings = examine()
    show(json.dumps(findings, indent=2) if args.json else "\n".join(_lines(findings)))
    return 0


def examine() -> dict[str, Any]:
    """All findings as plain values."""
    from moe_ep.registry import ALL2ALL_BACKENDS, EXPERTS

    return {
        "moe_ep": moe_ep.__version__,
        "folder": str(Path(moe_ep.__path__[0])),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpus": num_cpus(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "cache": {"folder": str(env.CACHE_DIR.get()), "unusable": _why_unwritable(env.CACHE_DIR.get())},
        "versions": {name: _version(name) for name in _PACKAGES},
        **_gpus(),
        "backends": {name: why_unusable(ALL2ALL_BACKENDS, name) for name in ALL2ALL_BACKENDS},
        "experts": {name: why_unusable(EXPERTS, name) for name in EXPERTS},
    }


def why_unusable(registry: Any, name: str) -> str | None:
    """Why a registry entry cannot run here, with the way out, in one line; None if it can."""
    try:
        reason = registry.load(name).unusable_reason()
    except Exception as error:
        # An error on import makes the class unusable, and is the reason.
        reason = f"{type(error).__name__}: {error}"
    return None if reason is None else " ".join(str(reason).split())


def _version(package: str) -> str | None:
    name = _DISTRIBUTIONS.get(package)
    for distribution in (package,) if name is None else (f"{name}13", f"{name}12"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(distribution)
    return None


def _why_unwritable(folder: Path) -> str | None:
    """Why a folder, which may not exist yet, cannot be written to, with the way out; None if it can."""
    existing = next(parent for parent in (folder, *folder.parents) if parent.exists())
    if existing.is_dir() and os.access(existing, os.W_OK | os.X_OK):
        return None
    return f"cannot be written to; set {env.CACHE_DIR.name} to a folder that can"


def _gpus() -> dict[str, Any]:
    """Finds GPUs, the driver, and which pairs reach each other's memory. Initializes CUDA in this process."""
    found: dict[str, Any] = {"driver": None, "cuda": None, "nccl_loaded": None, "gpus": [], "p2p": [], "gpu_note": None}
    try:
        import torch
    except ImportError as error:
        return found | {"gpu_note": f"torch cannot be imported ({error}); run: {_FIXES['torch']}"}
    found["cuda"] = torch.version.cuda
    if torch.version.cuda is None:
        return found | {"gpu_note": "torch is a CPU build; on a machine with GPUs install its CUDA build"}
    driver = Path("/sys/module/nvidia/version")
    found["driver"] = driver.read_text().strip() if driver.is_file() else None
    if not torch.cuda.is_available():
        return found | {"gpu_note": "torch sees no GPU; check nvidia-smi and CUDA_VISIBLE_DEVICES"}
    found["nccl_loaded"] = ".".join(map(str, torch.cuda.nccl.version()))
    count = torch.cuda.device_count()
    for index in range(count):
        properties = torch.cuda.get_device_properties(index)
        found["gpus"].append(
            {
                "index": index,
                "name": properties.name,
                "memory_bytes": properties.total_memory,
                "compute_capability": f"{properties.major}.{properties.minor}",
            }
        )
    found["p2p"] = [[a == b or torch.cuda.can_device_access_peer(a, b) for b in range(count)] for a in range(count)]
    return found


def _lines(findings: dict[str, Any]) -> list[str]:
    cache = findings["cache"]
    lines = [
        f"moe_ep {findings['moe_ep']} in {findings['folder']}",
        f"python {findings['python']} on {findings['platform']}",
        f"{findings['cpus']} CPU cores, {findings['memory_bytes'] / 2**30:.0f} GiB memory",
        f"cache in {cache['folder']}" + (f" ({cache['unusable']})" if cache["unusable"] else ""),
        "versions:",
    ]
    for name, version in findings["versions"].items():
        fix = _FIXES.get(name, "pip install 'moe_ep[cuda]'")
        lines.append(f"  {name:<14}{version or f'not installed; {fix}'}")
    lines.append(f"driver: {findings['driver'] or 'none'}, CUDA of torch: {findings['cuda'] or 'none'}")
    lines.append(f"GPUs: {len(findings['gpus'])}" + (f" ({findings['gpu_note']})" if findings["gpu_note"] else ""))
    for gpu in findings["gpus"]:
        memory = gpu["memory_bytes"] / 2**30
        lines.append(
            f"  {gpu['index']}: {gpu['name']}, {memory:.0f} GiB, sm_{gpu['compute_capability'].replace('.', '')}"
        )
    if findings["p2p"]:
        lines.append("P2P (row reaches column):")
        lines.append("      " + " ".join(f"{index:>3}" for index in range(len(findings["p2p"]))))
        for index, row in enumerate(findings["p2p"]):
            lines.append(f"  {index:>3} " + " ".join(f"{'yes' if reaches else 'no':>3}" for reaches in row))
    for kind in ("backends", "experts"):
        lines.append(f"{kind}:")
        lines += [
            f"  {name:<26}{'usable' if reason is None else f'not usable: {reason}'}"
            for name, reason in findings[kind].items()
        ]
    return lines
