"""What may be wrong with a tensor, and how a function refuses it; shared by tests of what is public."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

FORMS: dict[str, Callable[[torch.Tensor], Any]] = {
    "nothing": lambda tensor: None,
    "list": lambda tensor: tensor.tolist(),
    "complex": lambda tensor: tensor.to(torch.complex64),
    "f64": lambda tensor: tensor.to(torch.float64),
    "bool": lambda tensor: tensor.to(torch.bool),
    "no dimension": lambda tensor: tensor.flatten()[0],
    "one dimension more": lambda tensor: tensor.unsqueeze(0),
    "longer": lambda tensor: torch.cat([tensor, tensor[..., :1]], dim=-1),
    "shorter": lambda tensor: tensor[..., :-1].contiguous(),
    "one more": lambda tensor: torch.cat([tensor, tensor[:1]]),
    "spread": lambda tensor: torch.stack([tensor, tensor], dim=-1)[..., 0],
    "elsewhere": lambda tensor: tensor.to("meta"),
}


def check_refused(function: Callable[..., Any], given: dict[str, Any], named: str) -> None:
    """The function raises ValueError with one sentence that begins with what is named."""
    with pytest.raises(ValueError, match=f"^{named} (is|has|holds) ") as raised:
        function(**given)
    text = str(raised.value)
    assert not re.search(r"\n|[^.]\. ", text), text
