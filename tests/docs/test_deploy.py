"""The files that documents hand out are what they say."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
from pathlib import Path

import pytest

from moe_ep.observability import metrics

DOCS = Path(__file__).parents[2] / "docs"


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


def test_the_manifest_runs_one_worker_a_gpu() -> None:
    yaml = pytest.importorskip("yaml")
    spec = yaml.safe_load((DOCS / "deploy" / "kuberay.yaml").read_text())["spec"]
    words = shlex.split(spec["entrypoint"])
    (workers,) = spec["rayClusterSpec"]["workerGroupSpecs"]
    gpus = int(workers["template"]["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"])
    assert words[:2] == ["moe-ep", "run"]
    assert int(words[words.index("--ep-size") + 1]) == workers["replicas"] * gpus


def test_the_slurm_script_is_bash() -> None:
    script = DOCS / "deploy" / "slurm.sh"
    assert subprocess.run(["bash", "-n", script], capture_output=True).returncode == 0
    assert "python -m moe_ep.launch run" in script.read_text()
