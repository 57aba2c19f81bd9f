"""Ids of number types are vLLM's, to the bit."""

import pytest

from moe_ep.scalar_type import ScalarType, scalar_types


@pytest.mark.parametrize(
    ("name", "type_id", "bits"),
    [
        ("uint4", 1125899906843648, 4),
        ("uint4b8", 1125899907892224, 4),
        ("uint8b128", 1125899923621888, 8),
        ("float8_e4m3fn", 2814749767172868, 8),
        ("float4_e2m1f", 562949953487106, 4),
    ],
)
def test_ids(name, type_id, bits):
    scalar_type = getattr(scalar_types, name)
    assert scalar_type.id == type_id
    assert ScalarType.from_id(type_id) == scalar_type
    assert scalar_type.size_bits == bits
    assert str(scalar_type) == name


@pytest.mark.parametrize("type_id", [-1, 1 << 62, (1 << 58) - 1])
def test_an_id_of_nothing_is_refused(type_id):
    with pytest.raises(ValueError, match="quant_type_id is"):
        ScalarType.from_id(type_id)
    with pytest.raises(TypeError, match="quant_type_id is 'uint4'"):
        ScalarType.from_id("uint4")
