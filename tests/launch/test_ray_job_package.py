"""What examples/ray_job.py sends to a cluster that has no moe_ep of its own."""

from __future__ import annotations

import io
import json
import shutil
import subprocess
import sys
import threading
import zipfile
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

import pytest

ray = pytest.importorskip("ray")
SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "ray_job.py"


class Dashboard(BaseHTTPRequestHandler):
    """Takes a package and refuses the job."""

    packages: ClassVar[list[bytes]] = []

    def log_message(self, *_: object) -> None:
        """Says nothing."""

    def answer(self, code: int, content: dict[str, str]) -> None:
        body = json.dumps(content).encode()
        self.send_response(code)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def body(self) -> bytes:
        return self.rfile.read(int(self.headers["Content-Length"]))

    def do_GET(self) -> None:
        known = {"version": "4", "ray_version": ray.__version__, "ray_commit": "", "session_name": ""}
        self.answer(*((200, known) if "version" in self.path else (404, {})))

    def do_PUT(self) -> None:
        self.packages.append(self.body())
        self.answer(200, {})

    def do_POST(self) -> None:
        self.body()
        self.answer(500, {})


def packages_of(script: Path) -> list[bytes]:
    """What the script sends before its job."""
    Dashboard.packages.clear()
    with ThreadingHTTPServer(("127.0.0.1", 0), Dashboard) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}"
        subprocess.run([sys.executable, str(script), address, "run"], capture_output=True, timeout=600, check=False)
        server.shutdown()
    return list(Dashboard.packages)


def test_the_package_holds_the_code() -> None:
    (package,) = packages_of(SCRIPT)
    names = zipfile.ZipFile(io.BytesIO(package)).namelist()
    assert {"moe_ep/__init__.py", "examples/ray_job.py", "kernels/reference.py"} <= set(names)
    assert not [name for name in names if name.startswith((".", "tests/", "docs/"))]


def test_an_installed_one_sends_nothing(tmp_path: Path) -> None:
    installed = tmp_path / "moe_ep" / "launch"
    installed.mkdir(parents=True)
    shutil.copy(SCRIPT, installed)
    assert packages_of(installed / SCRIPT.name) == []
