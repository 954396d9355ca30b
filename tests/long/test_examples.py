"""The trainer loops of the README, run as they are against a real service and the built-in engine."""

import socket
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from rollout_svc.rpc.blocking import SyncRolloutClient

ROOT = Path(__file__).parent.parent.parent
EXAMPLES = ROOT / "examples"

if not EXAMPLES.is_dir():
    pytest.skip("the examples are not part of what is installed", allow_module_level=True)

MY_TRAINER = """
from pathlib import Path
from urllib.request import Request, urlopen
import json
from rollout_svc.embedded.model import build, preset
from rollout_svc.embedded.model import save_weights as write

import torch

STEPS = 2
seen = []
model = build(preset("tiny"), seed=7)

def train(groups):
    with torch.no_grad():
        model.head.weight.mul_(1.5)
    for group in groups:
        for sample in group["samples"]:
            assert sample["status"] == "COMPLETED" and sample["reward"] is not None
    seen.append(len(groups))

def save_weights_at(step):
    path = Path("weights") / str(step)
    path.mkdir(parents=True)
    write(build(preset("tiny"), seed=step), path / "model.safetensors")
    return str(path.resolve())

def push_weights(urls, step):
    path = save_weights_at(step)
    for url in urls:
        body = json.dumps({"model_path": path, "weight_version": str(step)}).encode()
        request = Request(url + "/update_weights_from_disk", data=body, headers={"Content-Type": "application/json"})
        assert json.load(urlopen(request))["success"]
"""


def free_port() -> int:
    """A port nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def start(*command: object, word: str) -> tuple[subprocess.Popen[str], str]:
    """Start a part and wait for the line that says where it is."""
    process = subprocess.Popen(
        [sys.executable, "-m", "rollout_svc", *map(str, command)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith(word):
            return process, line.split("url=")[1].strip()
    raise AssertionError(f"{command} ended: {process.wait()}")


@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", ["train_disk.py", "train_external.py", "train_publish.py"])
def test_a_reader_can_run_the_loop_as_it_stands(name: str, tmp_path: Path) -> None:
    """Two steps: batches arrive, weights move, the versions that the service reports follow."""
    engine, engine_url = start("engine", "--port", 0, word="engine.ready")
    (tmp_path / "p.jsonl").write_text('{"text": "1+1=", "ground_truth": "2"}\n{"text": "2+2=", "ground_truth": "4"}\n')
    config = {
        "service": {"port": free_port()},
        "tokenizer": {"path": "bytes"},
        "workers": [{"url": engine_url}],
        "tasks": [{"name": "t", "prompts": {"jsonl": "p.jsonl"}, "sampling": {"max_tokens": 8}}],
    }
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(config))
    service, url = start("serve", "--config", tmp_path / "c.yaml", "--log-level", "warning", word="service.ready")
    trainer = MY_TRAINER + ("\nsave_weights = save_weights_at\n" if name == "train_disk.py" else "")
    (tmp_path / "my_trainer.py").write_text(trainer)
    (tmp_path / "loop.py").write_text((EXAMPLES / name).read_text().replace("http://127.0.0.1:8700", url))
    try:
        ran = subprocess.run(
            [sys.executable, "loop.py"], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
        )
        assert ran.returncode == 0, ran.stderr
        with SyncRolloutClient(url) as client:
            status = client.status()
        assert status["weight_version"] == 2
        assert status["state"] == "running"
        assert status["workers"][0]["weight_version"] == 2
        assert status["weights"]["state"] == "idle"
    finally:
        service.terminate()
        engine.terminate()
        assert service.wait(30) == 0
        assert engine.wait(30) == 0
        for process in (service, engine):
            if process.stdout is not None:
                process.stdout.close()
