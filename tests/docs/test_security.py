"""What SECURITY.md promises of the code: nothing is unpickled, and no code of a checkpoint is asked for."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# Collectives of torch.distributed that pickle, and readers of pickles.
UNPICKLING = {
    "all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list", "send_object_list",
    "recv_object_list", "Unpickler",
}  # fmt: skip
TRUSTING = {"trust_remote_code", "allow_pickle", "allow_code"}


def calls(wing: str) -> Iterator[tuple[str, ast.Call]]:
    for path in (ROOT / wing).rglob("*.py"):
        if not path.is_symlink():
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Call):
                    yield f"{path.relative_to(ROOT)}:{node.lineno}", node


@pytest.mark.parametrize("wing", ["moe_ep", "kernels", "dispatch", "launch"])
def test_nothing_is_unpickled_and_nothing_is_trusted(wing: str) -> None:
    found = []
    for place, call in calls(wing):
        name = ast.unparse(call.func)
        if name.rpartition(".")[2] in UNPICKLING or name in ("pickle.load", "pickle.loads", "torch.load"):
            found.append(f"{place}: {name}")
        found += [
            f"{place}: {keyword.arg}"
            for keyword in call.keywords
            if keyword.arg in TRUSTING
            and not (isinstance(keyword.value, ast.Constant) and keyword.value.value is False)
        ]
    assert found == []
