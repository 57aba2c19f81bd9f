"""Rows of 8 bits as experts read them (`input_dtype`): the weights beside which they can be, and who decides.

A layer is asked for a dtype by name, for what its checkpoint was made for ("checkpoint"), or for rows as they are
("none"). On CPUs a dtype that is named rounds always, and "checkpoint" never does; on GPUs both round where a kernel
for it is faster.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any
from weakref import WeakValueDictionary

import torch

from moe_ep import env
from moe_ep.scalar_type import ScalarType, scalar_types

logger = logging.getLogger(__name__)

CHECKPOINT, NONE = "checkpoint", "none"
# The dtypes by their names in commands and MOE_EP_INPUT_DTYPE.
_NAMED = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
# Weights whose values (less their zero points) the tensor cores multiply with 8-bit rows, by the rows' dtype.
INPUT_DTYPES = {
    torch.int8: (scalar_types.uint4, scalar_types.uint4b8, scalar_types.uint8b128),
    torch.float8_e4m3fn: (
        scalar_types.float8_e4m3fn, scalar_types.float4_e2m1f, scalar_types.uint4b8, scalar_types.uint4,
    ),
}  # fmt: skip


@dataclass(frozen=True)
class InputRows:
    """The rows that the experts of a layer compute with.

    Attributes:
        dtype: torch.int8 or torch.float8_e4m3fn if they may be rounded to it; None for rows as they are.
    """

    dtype: torch.dtype | None
    why: str

    def __str__(self) -> str:
        rows = "not rounded" if self.dtype is None else f"rounded to {dtype_name(self.dtype)}"
        return f"rows {rows}: {self.why}"


def dtype_name(dtype: torch.dtype) -> str:
    """int8, float8_e4m3fn."""
    return str(dtype).removeprefix("torch.")


def input_dtype_of(name: str) -> torch.dtype | str:
    """The `input_dtype` of one of `env.INPUT_DTYPE_NAMES`."""
    return _NAMED.get(name, name)


def resolve_input_dtype(asked: torch.dtype | str | None, act_dtype: torch.dtype) -> torch.dtype | str:
    """Resolves a layer's `input_dtype`: torch.int8, torch.float8_e4m3fn, "checkpoint" or "none".

    Args:
        asked: None for MOE_EP_INPUT_DTYPE; act_dtype for "none".

    Raises:
        ValueError: anything else.
    """
    if asked is None:
        return input_dtype_of(env.INPUT_DTYPE.get())
    if asked == act_dtype:
        return NONE
    if asked not in (*INPUT_DTYPES, CHECKPOINT, NONE):
        raise ValueError(
            f"input_dtype is {asked}; it must be None, torch.int8, torch.float8_e4m3fn, 'checkpoint', 'none' or the "
            f"activations' own dtype ({act_dtype})"
        )
    return asked


def pair_refusal(input_dtype: torch.dtype, scalar_type: ScalarType, scale_dtype: torch.dtype) -> str | None:
    """Why rows of that dtype do not go with these weights, in one clause; None if they do.

    nvfp4 goes with none: its e4m3 scales stand for 16 columns and a step of the tensor cores is 32, so each value times
    its scale would be rounded to e4m3, which makes results off by 5.8 % instead of 4.4 %.
    """
    is_nvfp4 = scalar_type == scalar_types.float4_e2m1f and scale_dtype == torch.float8_e4m3fn
    if not is_nvfp4 and scalar_type in INPUT_DTYPES[input_dtype]:
        return None
    others = ", ".join(str(each) for each in INPUT_DTYPES[input_dtype])
    but = " (mxfp4, not nvfp4)" if scalar_types.float4_e2m1f in INPUT_DTYPES[input_dtype] else ""
    return f"weights are {scalar_type} with {scale_dtype} scales; {dtype_name(input_dtype)} rows go with {others}{but}"


# Messages that were logged, by text and by the object that the layers of a model share.
_logged: WeakValueDictionary[tuple[str, int], Any] = WeakValueDictionary()


def log_once(rows: InputRows, asked: torch.dtype | str, model: Any) -> None:
    """Logs what was chosen, once for all layers that share `model`."""
    key = (str(rows), id(model))
    if logger.isEnabledFor(logging.INFO) and key not in _logged:
        _logged[key] = model
        name = asked if isinstance(asked, str) else dtype_name(asked)
        logger.info("input_dtype %s: %s", name, rows)
