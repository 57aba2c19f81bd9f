"""What scripts say where they cannot run: one sentence, and no number of the machine's is taken for a measurement."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

sys.path.append(str(Path(__file__).parents[2] / "scripts"))
import bench_dispatch
import gemm_peers
import gemm_tables
import megamoe_peer
import peer_package
from gemm_cases import OF_PEERS, WEIGHTS
from harness import Bench, device_name, measure_on_gang, positive, positives, some_of, this_gpu, use_gpu_of_rank

from moe_ep.launch.cli.gang_options import GangConfig


def test_a_machine_without_gpus_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["scripts/bench_some.py"])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for ask in (this_gpu, use_gpu_of_rank):
        with pytest.raises(SystemExit, match="^bench_some.py measures on a GPU, and torch sees none here"):
            ask()


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ("--steps=0", "argument --steps: it is '0'; it must be a whole number of at least 1"),
        ("--tokens=1,x", "argument --tokens: it is '1,x'; it must be whole numbers of at least 1, as in 1,2,4,8"),
        ("--parts=send,wait", "'send,wait'; it must be some of send, receive, with commas between them"),
        ("--device=tpu0", "device is 'tpu0'; it must be a torch.device or the name of one, as cpu or cuda:0"),
        ("--device=cuda:99", "device is cuda:99 and this machine has"),
    ],
)
def test_a_wrong_option_is_one_sentence(wrong: str, sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    bench = Bench(None)
    add = bench.parser.add_argument
    add("--steps", type=positive)
    add("--tokens", type=positives)
    add("--parts", type=some_of(("send", "receive")))
    add("--device", type=device_name)
    found = bench.parse(["--steps=3", "--tokens=1,32", "--parts=receive,send", "--device=cpu"])
    assert (found.steps, found.tokens, found.parts, found.device) == (3, (1, 32), ["receive", "send"], "cpu")
    with pytest.raises(SystemExit, match="2"):
        bench.parse([wrong])
    assert sentence in capsys.readouterr().err


def test_a_script_for_several_gpus_says_how_it_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["scripts/soak_nvshmem.py"])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    with pytest.raises(SystemExit, match="torchrun --nproc-per-node GPUS scripts/soak_nvshmem.py"):
        use_gpu_of_rank()


@pytest.mark.parametrize(
    ("options", "code", "sentence"),
    [
        ("--ep-size two", 2, "bench_some.py: --ep-size is 'two'; it must be a whole number of at least 1\n"),
        ("--ep-size 9999 --device cpu", 2, "the gang asks for 9999 CPUs"),
    ],
)
def test_options_of_a_gang_are_refused_in_one_sentence(
    options: str, code: int, sentence: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["bench_some.py", "--launcher", "local", *options.split()])
    with pytest.raises(SystemExit) as caught:
        measure_on_gang("bench_some.py", "A benchmark.", GangConfig, print)
    error = capsys.readouterr().err
    assert caught.value.code == code
    assert sentence in error and error.startswith("bench_some.py: ") and error.count("\n") == 1


@pytest.mark.parametrize(
    ("peer", "weights", "needs"), [("deepgemm", "fp8", "sgl-deep-gemm"), ("humming-int8", "int4", "humming")]
)
def test_a_peer_that_is_not_installed_is_one_line(
    peer: str, weights: str, needs: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if any(map(importlib.util.find_spec, ("deep_gemm", "humming"))):
        pytest.skip("peers are installed")
    options = ["gemm_peers.py", peer, "--shape", "2", "256", "128", "--rows", "8", "--weights", weights]
    monkeypatch.setattr(sys, "argv", options)
    with pytest.raises(SystemExit, match="1"):
        gemm_peers.main()
    told = capsys.readouterr().out
    assert told.startswith(f"{peer}: ") and told.count("\n") == 1
    assert needs in told and f"{weights} weights, E 2, K 256, N 128" in told


def test_every_peer_has_weights_that_it_is_timed_with() -> None:
    assert set(gemm_peers.PEERS) == set(OF_PEERS)
    assert all(set(weights) <= set(WEIGHTS) for weights in OF_PEERS.values())
    assert set(OF_PEERS["humming-int8"]) <= set(gemm_peers.HummingInt8.CONFIGS)
    assert set(OF_PEERS["humming-fp8"]) <= set(gemm_peers.HummingFp8.CONFIGS)


def test_files_that_hold_no_rows_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "cut.jsonl").write_text('{"shape": ')
    (tmp_path / "other.jsonl").write_text('{"moe_ep": "0.1.0"}')
    (tmp_path / "empty.jsonl").touch()
    for name in ("nowhere.jsonl", "cut.jsonl", "other.jsonl", "empty.jsonl"):
        monkeypatch.setattr(sys, "argv", ["gemm_tables.py", str(tmp_path / name)])
        with pytest.raises(SystemExit, match="2"):
            gemm_tables.main()
        assert "results holds no rows of bench_gemm.py" in capsys.readouterr().err
        with pytest.raises(SystemExit, match=r"--markdown .* holds no rows of bench_dispatch.py"):
            bench_dispatch.main(["--markdown", str(tmp_path / name)])
        assert not capsys.readouterr().out


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (ModuleNotFoundError("No module named 'deep_gemm'", name="deep_gemm"), "not installed"),
        (ModuleNotFoundError("No module named 'tvm_ffi'", name="tvm_ffi"), "tvm_ffi"),
        (OSError("undefined symbol: _ZN3c10"), "undefined symbol"),
        (SimpleNamespace(fp8_mega_moe=None), "get_symm_buffer_for_sm90_mega_moe"),
    ],
)
def test_megamoe_that_does_not_serve_is_named_with_the_version_that_does(found: Any, said: str) -> None:
    def load(name: str) -> Any:
        if isinstance(found, Exception):
            raise found
        return found

    with pytest.raises(peer_package.PeerUnavailableError, match=said) as raised:
        megamoe_peer.PACKAGE.load(load)
    assert megamoe_peer.PACKAGE.known_good in str(raised.value)
