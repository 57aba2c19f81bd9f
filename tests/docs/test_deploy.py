"""The files that documents hand out are what they say."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest

from moe_ep.observability import metrics

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"


def test_the_dashboard_shows_every_metric_and_no_other() -> None:
    dashboard = json.loads((DOCS / "deploy" / "grafana_dashboard.json").read_text())
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    shown = {re.sub(r"_bucket$", "", name) for query in queries for name in re.findall(r"moe_ep_\w+", query)}
    assert shown == {metric.name for metric in metrics.ALL}
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])
    labels = {label for query in queries for label in re.findall(r"by \((\w+)\)", query)} - {"le"}
    assert labels <= {label for metric in metrics.ALL for label in metric.labels}


def test_the_metrics_table_is_complete() -> None:
    text = (DOCS / "observability.md").read_text()
    for metric in metrics.ALL:
        rows = [line for line in text.splitlines() if line.startswith("|") and f"`{metric.name}`" in line]
        assert len(rows) == 1 and metric.kind in rows[0]
        assert all(label in rows[0] for label in metric.labels)


def manifest() -> dict[str, Any]:
    yaml = pytest.importorskip("yaml")
    return yaml.safe_load((DOCS / "deploy" / "kuberay.yaml").read_text())["spec"]


def test_the_manifest_runs_one_worker_a_gpu() -> None:
    spec = manifest()
    words = shlex.split(spec["entrypoint"])
    (workers,) = spec["rayClusterSpec"]["workerGroupSpecs"]
    (container,) = workers["template"]["spec"]["containers"]
    gpus = int(container["resources"]["limits"]["nvidia.com/gpu"])
    assert words[:2] == ["moe-ep", "run"]
    assert int(words[words.index("--ep-size") + 1]) == workers["replicas"] * gpus


def test_pods_of_gpu_hosts_reach_gpus_and_network_cards() -> None:
    """Extended resources have equal requests and limits, and registered memory needs IPC_LOCK."""
    (workers,) = manifest()["rayClusterSpec"]["workerGroupSpecs"]
    pod = workers["template"]["spec"]
    (container,) = pod["containers"]
    assert container["resources"]["requests"] == container["resources"]["limits"]
    assert [name for name in container["resources"]["limits"] if name.startswith("rdma/")]
    assert "IPC_LOCK" in container["securityContext"]["capabilities"]["add"]
    assert "nvidia.com/gpu" in {toleration["key"] for toleration in pod["tolerations"]}
    mounted = {volume["mountPath"] for volume in container["volumeMounts"]}
    assert "/dev/shm" in mounted and {volume["name"] for volume in container["volumeMounts"]} <= {
        volume["name"] for volume in pod["volumes"]
    }


def test_the_image_holds_what_is_installed_from() -> None:
    """Every folder of the package is copied, none of it is ignored, and the extras exist."""
    text = (ROOT / "Dockerfile").read_text().replace("\\\n", " ")
    copied = {name for line in re.findall(r"^COPY (.+)$", text, re.MULTILINE) for name in line.split()[:-1]}
    assert {"moe_ep", "kernels", "dispatch", "launch", "pyproject.toml", "README.md", "LICENSE"} <= copied
    assert all((ROOT / name).exists() for name in copied)
    ignored = (ROOT / ".dockerignore").read_text().split()
    assert not copied & set(ignored)
    (extras,) = re.findall(r'"\.\[([\w,]+)\]"', text)
    known = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert set(extras.split(",")) <= set(known)
    images = re.findall(r"image: (\S+)", (DOCS / "deploy" / "kuberay.yaml").read_text())
    assert set(images) == set(re.findall(r"docker build -t (\S+)", text))


def test_the_slurm_script_is_bash() -> None:
    script = DOCS / "deploy" / "slurm.sh"
    assert subprocess.run(["bash", "-n", script], capture_output=True).returncode == 0
    assert "python -m moe_ep.launch run" in script.read_text()
