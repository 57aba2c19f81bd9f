"""What the checks that all take in common say of tensors of ids and maps."""

from __future__ import annotations

import pytest
import torch

from moe_ep.arguments import check_expert_map
from moe_ep.dispatch.batch import check_arguments
from moe_ep.kernels.align import moe_align_block_size


@pytest.mark.parametrize("dtype", [torch.uint16, torch.uint32, torch.uint64], ids=str)
def test_wide_unsigned_integers_are_refused_with_what_is_taken(dtype: torch.dtype) -> None:
    """They are integers, so it would not do to ask for these."""
    ids, taken = torch.zeros(2, 1, dtype=dtype), "must be .*uint8, int8, int16, int32 or int64"
    with pytest.raises(ValueError, match=taken):
        moe_align_block_size(ids, 4, 2)
    with pytest.raises(ValueError, match=taken):
        check_arguments(torch.zeros(2, 16), torch.zeros(2, 1), ids, False, 2)
    with pytest.raises(ValueError, match=taken):
        check_expert_map(ids[0])


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64], ids=str)
def test_all_integers_that_messages_name_are_taken(dtype: torch.dtype) -> None:
    ids = torch.zeros(2, 1, dtype=dtype)
    assert moe_align_block_size(ids, 4, 2)[2].tolist() == [4]
    check_arguments(torch.zeros(2, 16), torch.zeros(2, 1), ids, False, 2)
    check_expert_map(ids[0])
