"""The object that joins the two contracts: formats, scratch, chunking, shared experts, -1 ids, T = 0."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from moe_ep.config import FusedMoEConfig, FusedMoEParallelConfig, FusedMoEQuantConfig
from moe_ep.dispatch.no_ep import NoEPPrepareFinalize
from moe_ep.errors import ConfigError
from moe_ep.kernels.reference import BatchedReferenceExperts, ReferenceExperts
from moe_ep.modular_kernel import (
    ExpertTokensMetadata,
    FusedMoEModularKernel,
    make_experts,
    make_prepare_finalize,
)
from moe_ep.modular_kernel.workspace import workspace_manager
from tests.ranks import ranks

E, TOPK, K, N = 6, 3, 16, 24


def moe_config(topk=TOPK, dtype=torch.float32):
    return FusedMoEConfig(
        num_experts=E,
        experts_per_token=topk,
        hidden_dim=K,
        intermediate_size_per_partition=N,
        num_local_experts=E,
        moe_parallel_config=FusedMoEParallelConfig.make(),
        in_dtype=dtype,
        max_num_tokens=64,
    )


def kernel(shared_experts=None, topk=TOPK):
    config = moe_config(topk)
    return FusedMoEModularKernel(
        make_prepare_finalize("no_ep", config), make_experts("reference", config), shared_experts
    )


def problem(num_tokens, topk=TOPK):
    generator = torch.Generator().manual_seed(num_tokens)
    x = torch.randn(num_tokens, K, generator=generator)
    w1 = torch.randn(E, 2 * N, K, generator=generator) / K**0.5
    w2 = torch.randn(E, K, N, generator=generator) / N**0.5
    ids = torch.rand(num_tokens, E, generator=generator).argsort(1)[:, :topk].int()
    return x, w1, w2, torch.rand(num_tokens, topk, generator=generator), ids


def plain_moe(x, w1, w2, weights, ids):
    output = torch.zeros(x.shape)
    for t in range(x.size(0)):
        for slot in range(ids.size(1)):
            expert = ids[t, slot].item()
            if expert >= 0:
                gate, up = (w1[expert] @ x[t]).chunk(2)
                output[t] += weights[t, slot] * (w2[expert] @ (nn.functional.silu(gate) * up))
    return output


@pytest.mark.parametrize("num_tokens", [0, 1, 7, 33])
def test_equals_plain_loops(num_tokens):
    x, w1, w2, weights, ids = problem(num_tokens)
    ids[::3, 0] = -1
    got = kernel()(x, w1, w2, weights, ids)
    torch.testing.assert_close(got, plain_moe(x, w1, w2, weights, ids))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(kernel()(x, w1, w2, weights, ids), got)


@pytest.mark.parametrize(
    ("name", "wrong", "words"),
    [
        ("hidden_states", lambda x: [1.0], "hidden_states is a list; it must be a tensor"),
        ("w2", lambda w2: None, "w2 is None; it must be a tensor"),
        ("w1", lambda w1: w1[0, 0, 0], "w1 is of shape \\(\\); it must have dimensions of experts and of rows"),
        ("w1", lambda w1: w1[:, 0, 0], "w1 is of shape \\(6,\\); it must have dimensions of experts"),
        ("w1", lambda w1: w1[0], "must be \\(experts, 2N, K\\)"),
        ("w1", lambda w1: w1[:, :, :8], "must be \\(experts, 2N, K\\)"),
        ("w1", lambda w1: w1[:, :-1], "must be \\(experts, 2N, K\\)"),
        ("w2", lambda w2: w2[:3], "w2 \\(3, 16, 24\\)"),
        ("w2", lambda w2: w2[:, :8], "w2 \\(6, 8, 24\\)"),
        ("w2", lambda w2: w2[:, :, :8], "w2 \\(6, 16, 8\\)"),
        ("w2", lambda w2: w2.int(), "w2 is torch.int32 and quant_config has no quant_type_id"),
        ("w1", lambda w1: w1.to("meta"), "w1 is on meta"),
    ],
)
def test_tensors_that_do_not_fit_are_named(name, wrong, words):
    arguments = dict(zip(("hidden_states", "w1", "w2", "topk_weights", "topk_ids"), problem(5), strict=True))
    arguments[name] = wrong(arguments[name])
    with pytest.raises(ValueError, match=words):
        kernel()(**arguments)


def test_inplace_writes_over_the_input():
    x, w1, w2, weights, ids = problem(5)
    expected = plain_moe(x, w1, w2, weights, ids)
    assert kernel()(x, w1, w2, weights, ids, inplace=True) is x
    torch.testing.assert_close(x, expected)


@pytest.mark.parametrize("inplace", [False, True])
def test_experts_write_the_output_where_finalize_would_only_copy_it(inplace):
    x, w1, w2, weights, ids = problem(5)
    expected, written = plain_moe(x, w1, w2, weights, ids), []

    class Experts(ReferenceExperts):
        def apply(self, output, *args):
            written.append(output.data_ptr())
            super().apply(output, *args)

    of_one_rank = FusedMoEModularKernel(make_prepare_finalize("no_ep", moe_config()), Experts(moe_config()))
    got = of_one_rank(x, w1, w2, weights, ids, inplace=inplace)
    assert (written == [got.data_ptr()]) is not inplace
    torch.testing.assert_close(got, expected)


def test_experts_of_another_dtype_do_not_write_the_output():
    x, w1, w2, weights, ids = problem(5)
    seen = []

    class Experts(ReferenceExperts):
        def workspace_dtype(self, act_dtype):
            return torch.float64

        def apply(self, output, *args):
            seen.append(output.dtype)
            super().apply(output, *args)

    got = FusedMoEModularKernel(NoEPPrepareFinalize(moe_config=moe_config()), Experts(moe_config()))(
        x, w1, w2, weights, ids
    )
    assert seen == [torch.float64] and got.dtype == torch.float32
    torch.testing.assert_close(got, plain_moe(x, w1, w2, weights, ids))


@pytest.mark.parametrize("by_reference", [False, True])
def test_rows_go_by_reference_to_experts_that_take_them_so(by_reference):
    class Experts(ReferenceExperts):
        def supports_row_ids(self):
            return by_reference

    class Backend(NoEPPrepareFinalize):
        handed_over = False

        def hand_over_row_ids(self):
            self.handed_over = True

    backend = Backend(moe_config=moe_config())
    FusedMoEModularKernel(backend, Experts(moe_config()))
    assert backend.handed_over is by_reference


@pytest.mark.parametrize("chunks", [False, True])
def test_scratch_is_for_the_rows_of_a_chunk_where_experts_allow_chunks(monkeypatch, chunks):
    seen = []

    class Experts(ReferenceExperts):
        def supports_chunking(self):
            return chunks

        def workspace_shapes(self, M, N, K, *args):
            return (M, 1), (2 * M,), (M, K)

        def apply(self, output, hidden_states, *args):
            seen.append((len(output), len(hidden_states), tuple(args[9].shape), tuple(args[10].shape)))
            super().apply(output, hidden_states, *args)

    monkeypatch.setenv("MOE_EP_CHUNK_SIZE", "4")
    FusedMoEModularKernel(NoEPPrepareFinalize(moe_config=moe_config()), Experts(moe_config()))(*problem(6))
    assert seen == ([(4, 4, (4, 1), (8,)), (2, 2, (4, 1), (8,))] if chunks else [(6, 6, (6, 1), (12,))])


@pytest.mark.parametrize("chunk", ["1", "4", "7", "100"])
def test_chunks_are_together_what_the_whole_is(monkeypatch, chunk):
    x, w1, w2, weights, ids = problem(14)
    whole = kernel()(x, w1, w2, weights, ids).clone()
    monkeypatch.setenv("MOE_EP_CHUNK_SIZE", chunk)
    # A matrix product of fewer rows may sum in another order; the split itself must lose nothing.
    torch.testing.assert_close(kernel()(x, w1, w2, weights, ids), whole)


@pytest.mark.parametrize("chunk", ["4", "100"])
def test_a_chunk_gets_its_rows_scales_and_metadata_go_with_the_whole(monkeypatch, chunk):
    """Of a backend that hands over scales and counts."""
    x, w1, w2, weights, ids = problem(10)
    scales, meta, seen = torch.rand(10, 1), ExpertTokensMetadata.make_from_list([5] * E, "cpu"), []

    class Scaled(NoEPPrepareFinalize):
        def prepare(self, *args):
            rows, _, _, ids, weights = super().prepare(*args)
            return rows, scales, meta, ids, weights

    class Experts(ReferenceExperts):
        def apply(self, output, hidden_states, *args):
            seen.append((args[7], args[11]))
            super().apply(output, hidden_states, *args)

    monkeypatch.setenv("MOE_EP_CHUNK_SIZE", chunk)
    got = FusedMoEModularKernel(Scaled(moe_config=moe_config()), Experts(moe_config()))(x, w1, w2, weights, ids)
    torch.testing.assert_close(got, plain_moe(x, w1, w2, weights, ids))
    assert torch.equal(torch.cat([part for part, _ in seen]), scales)
    assert [part for _, part in seen] == ([meta] if chunk == "100" else [None] * 3)


def test_experts_are_not_called_for_no_rows_and_told_how_many_ids_there_are():
    seen = []

    class Experts(ReferenceExperts):
        def apply(self, *args):
            seen.append((args[1].size(0), args[7]))
            super().apply(*args)

    of_all = FusedMoEModularKernel(make_prepare_finalize("no_ep", moe_config()), Experts(moe_config()))
    for num_tokens in (0, 2):
        of_all(*problem(num_tokens))
    expert_map = torch.tensor([*range(E), -1], dtype=torch.int32)
    of_all(*problem(3), global_num_experts=E + 1, expert_map=expert_map)
    assert seen == [(2, E), (3, E + 1)]


def test_shared_experts_come_beside_the_routed():
    shared = nn.Linear(K, K)
    x, w1, w2, weights, ids = problem(4)
    shared_output, output = kernel(shared)(x, w1, w2, weights, ids)
    assert torch.equal(shared_output, shared(x))
    torch.testing.assert_close(output, plain_moe(x, w1, w2, weights, ids))
    other = torch.randn(4, K)
    assert torch.equal(kernel(shared)(x, w1, w2, weights, ids, shared_experts_input=other)[0], shared(other))


def test_router_weight_on_input_needs_top_1():
    x, w1, w2, weights, ids = problem(4)
    with pytest.raises(ValueError, match="needs top_k 1 and top_k is 3"):
        kernel()(x, w1, w2, weights, ids, apply_router_weight_on_input=True)
    x, w1, w2, weights, ids = problem(4, topk=1)
    got = kernel(topk=1)(x, w1, w2, weights, ids, apply_router_weight_on_input=True)
    torch.testing.assert_close(got, plain_moe(x * weights, w1, w2, torch.ones(4, 1), ids))


@pytest.mark.parametrize("name", ["inplace", "apply_router_weight_on_input"])
def test_flags_are_true_or_false(name):
    given = problem(4, topk=1)
    before = given[0].clone()
    with pytest.raises(TypeError, match=f"{name} is 'false'; it must be True or False"):
        kernel(topk=1)(*given, **{name: "false"})
    assert torch.equal(given[0], before)


@pytest.mark.parametrize("value", [None, "x", 1.5])
def test_the_number_of_experts_is_whole(value):
    with pytest.raises(TypeError, match=f"^global_num_experts is {value!r}; it must be a whole number"):
        kernel()(*problem(2), global_num_experts=value)


def test_shared_experts_are_a_module():
    with pytest.raises(
        TypeError, match=r"^shared_experts is 5; it must be a module from \[T, K\] to \[T, K\], or None"
    ):
        kernel(shared_experts=5)


@pytest.mark.parametrize("name", ["reference", "batched_reference", "grouped", "marlin"])
def test_experts_take_a_quant_config(name):
    with pytest.raises(TypeError, match="^quant_config is 'x'; it must be a FusedMoEQuantConfig, or None for plain"):
        make_experts(name, moe_config(), "x")


def test_ids_without_weights_need_a_map():
    x, w1, w2, weights, ids = problem(4)
    with pytest.raises(ValueError, match="global_num_experts is 6, w1 has 3 experts and expert_map is None, that is,"):
        kernel()(x, w1[:3], w2[:3], weights, ids, global_num_experts=E)


def test_a_map_of_more_experts_than_there_are_is_refused():
    x, w1, w2, weights, ids = problem(2)
    run = kernel()
    mapping = torch.arange(E, dtype=torch.int32)
    assert torch.equal(run(x, w1, w2, weights, ids, expert_map=mapping), run(x, w1, w2, weights, ids))
    with pytest.raises(ValueError, match=f"expert_map names local expert {E} and w1 has {E} experts; pass the map of"):
        run(x, w1, w2, weights, ids, expert_map=mapping + 1)
    with pytest.raises(ValueError, match="expert_map is a list"):
        run(x, w1, w2, weights, ids, expert_map=mapping.tolist())


def test_rows_of_any_strides_give_a_contiguous_output():
    x, w1, w2, weights, ids = problem(4)
    got = kernel()(x.T.contiguous().T, w1, w2, weights, ids)
    assert got.is_contiguous()
    torch.testing.assert_close(got, plain_moe(x, w1, w2, weights, ids))


def test_inputs_with_gradients_are_refused_and_weights_with_them_are_not_followed():
    x, w1, w2, weights, ids = problem(4)
    for inputs in ((x.clone().requires_grad_(), weights), (x, weights.clone().requires_grad_())):
        with pytest.raises(RuntimeError, match="experts of the modular kernel are for inference and have no backward"):
            kernel()(inputs[0], w1, w2, inputs[1], ids)
    for inplace in (False, True):
        got = kernel()(x.clone(), nn.Parameter(w1), nn.Parameter(w2), weights, ids, inplace=inplace)
        assert not got.requires_grad
        torch.testing.assert_close(got, plain_moe(x, w1, w2, weights, ids))


class FailingOnce(BatchedReferenceExperts):
    """Fails in its first pass."""

    failed = False

    def run(self, step):
        if not self.failed:
            self.failed = True
            raise MemoryError
        super().run(step)


def passes_with_one_tensor_of_ids(rank, world_size):
    parallel = FusedMoEParallelConfig.make(ep_size=world_size, rank=rank)
    num_local = E // world_size
    config = replace(moe_config(), num_local_experts=num_local, moe_parallel_config=parallel)
    backend = make_prepare_finalize("batched_all_to_all", config)
    joined = FusedMoEModularKernel(backend, FailingOnce(config))
    (x, _, _, weights, ids), (_, w1, w2, _, _) = problem(5 + rank), problem(5)
    own = slice(rank * num_local, (rank + 1) * num_local)
    args = (w1[own], w2[own], weights, ids)
    with pytest.raises(MemoryError):
        joined(x, *args, global_num_experts=E)
    for _ in range(2):
        ids.copy_(ids.flip(0))
        got = joined(x, *args, global_num_experts=E)
        torch.testing.assert_close(got, plain_moe(x, w1, w2, weights, ids))


def test_a_pass_that_failed_does_not_disturb_the_next():
    ranks(2).run(passes_with_one_tensor_of_ids)


def test_formats_must_agree():
    config = moe_config()
    with pytest.raises(
        ValueError, match="NoEPPrepareFinalize with activation format Standard and .* with BatchedExperts"
    ):
        FusedMoEModularKernel(make_prepare_finalize("no_ep", config), make_experts("batched_reference", config))


class Overlapping(NoEPPrepareFinalize):
    """Rows are there once experts have called what `arrival` is."""

    def overlaps_experts(self):
        return True

    def dispatch(self, hidden_states, routing, quant_config):
        sent = super().dispatch(hidden_states, routing, quant_config)
        rows = torch.full_like(sent.rows, float("nan"))
        return replace(sent, rows=rows, arrival=lambda: rows.copy_(sent.rows))


class Waiting(ReferenceExperts):
    """Experts that begin before their rows are there."""

    def refuses_overlap(self):
        return None

    def run(self, call):
        call.arrival()
        for slot in range(call.topk_ids.size(1)):
            one, weights = call.topk_ids[:, slot : slot + 1], torch.ones(call.topk_ids.size(0), 1)
            call.output[:, slot] = plain_moe(call.hidden_states, call.w1, call.w2, weights, one)


def test_experts_run_while_rows_are_in_flight_if_they_can(monkeypatch):
    monkeypatch.setenv("MOE_EP_CHUNK_SIZE", "2")  # rows in flight are not cut into chunks
    config, (x, w1, w2, weights, ids) = moe_config(), problem(7)
    backend = Overlapping(moe_config=config)
    got = FusedMoEModularKernel(backend, Waiting(config))(x, w1, w2, weights, ids)
    torch.testing.assert_close(got, plain_moe(x, w1, w2, weights, ids))
    with pytest.raises(ConfigError, match="overlap .*ReferenceExperts"):
        FusedMoEModularKernel(backend, ReferenceExperts(config))
    with pytest.raises(RuntimeError, match="Overlapping"):
        backend.prepare(x, weights, ids, E, None, False, FusedMoEQuantConfig.unquantized())


def test_unknown_names_list_the_known():
    with pytest.raises(ValueError, match=r"all2all_backend is 'foo'; .*all_to_all"):
        make_prepare_finalize("foo", moe_config())
    with pytest.raises(ValueError, match=r"experts is 'foo'; .*reference"):
        make_experts("foo", moe_config())


def test_scratch_is_shared_by_all_kernels():
    x, w1, w2, weights, ids = problem(40)
    kernel()(x, w1, w2, weights, ids)
    held = workspace_manager().num_bytes(x.device)
    kernel()(x, w1, w2, weights, ids)
    assert workspace_manager().num_bytes(x.device) == held


class Roomy(NoEPPrepareFinalize):
    """Says that a captured pass has many rows."""

    def most_rows(self):
        return 4000


def test_there_is_scratch_for_the_rows_of_a_captured_pass():
    x, w1, w2, weights, ids = problem(5)
    roomy = FusedMoEModularKernel(Roomy(moe_config=moe_config()), make_experts("reference", moe_config()))
    assert torch.equal(roomy(x, w1, w2, weights, ids), kernel()(x, w1, w2, weights, ids))
    held = workspace_manager().num_bytes(x.device)
    kernel()(torch.zeros(4000, K), w1, w2, torch.zeros(4000, TOPK), torch.zeros(4000, TOPK, dtype=torch.int32))
    assert workspace_manager().num_bytes(x.device) == held


def test_metadata_from_a_list():
    with torch.device("meta"):
        meta = ExpertTokensMetadata.make_from_list([2, 0, 3], "cpu")
    assert meta.expert_num_tokens.tolist() == [2, 0, 3] == meta.expert_num_tokens_cpu.tolist()
    assert meta.expert_num_tokens.dtype == torch.int32 and meta.expert_row_ids is None
    for counts, message in (
        ([2, -1], "counts is -1; it must be at least 0"),
        ([1.5], "counts is 1.5; it must be a whole"),
        ([1 << 40], "counts is 1099511627776; it must be at least 0 and below"),
        (None, "counts is None; it must be a list of whole numbers"),
        ("12", "counts is '12'; it must be a list of whole numbers"),
    ):
        with pytest.raises((ValueError, TypeError), match=message):
            ExpertTokensMetadata.make_from_list(counts, "cpu")
    with pytest.raises(ValueError, match=r"^device is 'x'; it must be a torch.device or the name of one"):
        ExpertTokensMetadata.make_from_list([1], "x")
