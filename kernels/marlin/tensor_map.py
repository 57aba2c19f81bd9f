"""Tensor maps, which describe a matrix in global memory for Hopper's tensor copies.

A map depends only on address and shape, so maps are cached; encoding one takes microseconds. The format of the 128
bytes is internal to the driver (CUDA driver API, cuTensorMapEncodeTiled).
"""

from __future__ import annotations

import ctypes
import functools

import torch

from moe_ep.kernels import jit

NUM_BYTES = 128
_BOX_ROWS, _BOX_BYTES = 32, 128  # kBoxTokens of the kernels' stages; what a row of swizzled tokens has


@functools.lru_cache(maxsize=1024)
def encode(address: int, num_rows: int, num_columns: int, dtype: torch.dtype) -> bytes:
    """The map of a contiguous matrix, copied in boxes of 32 rows x 128 bytes, swizzle 128, zeros out of bounds.

    Args:
        dtype: bfloat16, float16, or uint8 for the codes of 8-bit numbers.

    Raises:
        ImportError: cuda-core is missing.
        RuntimeError: the driver refuses the matrix.
    """
    driver = jit.driver_bindings()
    formats = driver.CUtensorMapDataType
    of_dtype = {
        torch.bfloat16: formats.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
        torch.float16: formats.CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
        torch.uint8: formats.CU_TENSOR_MAP_DATA_TYPE_UINT8,
    }
    sizes = [driver.cuuint64_t(num_columns), driver.cuuint64_t(num_rows)]
    box = [driver.cuuint32_t(_BOX_BYTES // dtype.itemsize), driver.cuuint32_t(_BOX_ROWS)]
    steps = [driver.cuuint32_t(1), driver.cuuint32_t(1)]
    result = driver.cuTensorMapEncodeTiled(
        of_dtype[dtype],
        len(sizes),
        address,
        sizes,
        [driver.cuuint64_t(num_columns * dtype.itemsize)],
        box,
        steps,
        driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
        driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
        driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
    )
    return ctypes.string_at(jit.checked(result).getPtr(), NUM_BYTES)
