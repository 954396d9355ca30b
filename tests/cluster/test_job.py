"""`examples/ray_job.py`, submitted as the README says."""

from __future__ import annotations

import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from rollout_svc.demo.processes import Children
from tests.cluster.configs import engine, service

NODE = "127.0.2.1"
STARTED_S = 60
EXAMPLE = Path(__file__).parent.parent.parent / "examples" / "ray_job.py"

if not EXAMPLE.is_file():
    pytest.skip("the examples are not part of what is installed", allow_module_level=True)

MY_TRAINER = """
from pathlib import Path

from rollout_svc.embedded.model import build, preset
from rollout_svc.embedded.model import save_weights as write

STEPS = 2

def train(groups):
    samples = [sample for group in groups for sample in group["samples"]]
    assert len(groups) == 4 and all(sample["status"] == "COMPLETED" for sample in samples)
    print("trained on", sorted({sample["reward"] for sample in samples}))

def save_weights(step):
    path = Path("FOLDER") / str(step)
    path.mkdir(parents=True)
    write(build(preset("tiny"), seed=step), path / "model.safetensors")
    return str(path)
"""
JUDGE = """
class Judge:
    def judge(self, sample):
        return 0.5
"""


def free_ports(address: str, count: int) -> list[int]:
    """Ports at which nobody listens now."""
    probes = [socket.create_server((address, 0)) for _ in range(count)]
    ports = [int(probe.getsockname()[1]) for probe in probes]
    for probe in probes:
        probe.close()
    return ports


@pytest.fixture
def dashboard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Run a cluster of one node; gives the url that takes jobs.

    Nodes that share a machine share the folder that a job's files are unpacked to, and one removes it under another.
    """
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("RAY_AUTH_TOKEN", secrets.token_hex(32))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    port, agent, http = free_ports(NODE, 3)
    with tempfile.TemporaryDirectory(prefix="ray-job-", ignore_cleanup_errors=True) as home, Children(tmp_path) as all_:
        monkeypatch.setenv("HOME", home)
        monkeypatch.setenv("RAY_TMPDIR", home)
        given = {"node-ip-address": NODE, "port": port, "temp-dir": f"{home}/ray", "num-cpus": 4}
        given |= {"include-dashboard": "true", "dashboard-host": "127.0.0.1", "dashboard-port": http}
        given |= {"dashboard-agent-listen-port": agent, "object-store-memory": 100_000_000}
        words = [f"--{name}={value}" for name, value in given.items()]
        node = all_.start("ray", "ray", "ray.scripts.scripts", ["start", "--head", "--block", *words])
        deadline = time.monotonic() + STARTED_S
        while "ray start --address" not in node.log.read_text() and time.monotonic() < deadline:
            node.check()
            time.sleep(0.1)
        yield f"http://127.0.0.1:{http}"


@pytest.mark.timeout(240)
def test_a_reader_can_submit_the_loop_as_it_stands(tmp_path: Path, dashboard: str) -> None:
    """Two steps in a job of its own, with the folder it was submitted from; it says how it went."""
    folder = tmp_path / "job"
    folder.mkdir()
    shutil.copy(EXAMPLE, folder)
    (folder / "my_trainer.py").write_text(MY_TRAINER.replace("FOLDER", str(tmp_path / "weights")))
    (folder / "my_judge.py").write_text(JUDGE)
    (folder / "p.jsonl").write_text('{"text": "1+1="}\n{"text": "2+2="}\n' * 4)
    task = {"name": "t", "prompts": {"jsonl": "p.jsonl"}, "judger": {"path": "my_judge:Judge"}}
    sections = service(engine(), engine(), tokenizer={"path": "bytes"})
    sections["tasks"] = [task | {"sampling": {"max_tokens": 8}}]
    (folder / "rollout.yaml").write_text(yaml.safe_dump(sections))
    submit = [sys.executable, "-m", "ray.scripts.scripts", "job", "submit", "--address", dashboard]
    done = subprocess.run(
        [*submit, "--working-dir", str(folder), "--", sys.executable, "ray_job.py"],
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("trained on [0.5]") == 2
    assert sorted(path.name for path in (tmp_path / "weights").iterdir()) == ["1", "2"]
