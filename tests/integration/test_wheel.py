"""A wheel, built and installed as ``deploy/Containerfile`` says, in an empty environment, away from the checkout.

Every step of that file but its base image is done here one by one: what it copies, the environment it makes, the extras
it installs, the command it serves with. Set ``ROLLOUT_BUFFER_TEST_WHEEL=1``; installing from the index takes minutes.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import requests

from slime_plugins.rollout_buffer.client import RolloutBufferClient
from slime_plugins.rollout_buffer.demo_tokenizer import DEMO_TOKENIZER_PATH
from slime_plugins.rollout_buffer.supervisor.child_processes import ChildProcess, free_port
from tests.integration.conftest import answers
from tests.waiting import wait_until

pytestmark = pytest.mark.timeout(1800)

if not os.environ.get("ROLLOUT_BUFFER_TEST_WHEEL"):
    pytest.skip("ROLLOUT_BUFFER_TEST_WHEEL is not set", allow_module_level=True)

ROOT = Path(__file__).resolve().parents[2]
CONTAINERFILE = (ROOT / "deploy" / "Containerfile").read_text(encoding="utf-8")
PLAIN = {
    name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "ROLLOUT_BUFFER", "VIRTUAL"))
}


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of programs of an environment that has the wheel and nothing of the checkout."""
    source, place = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("environment") / "venv"
    for line in re.findall(r"^COPY (?!--from)(.+)$", CONTAINERFILE, re.MULTILINE):
        *names, _to = line.split()
        for name in names:
            if (ROOT / name).is_dir():
                shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(ROOT / name, source / name)
    (install,) = re.findall(r"pip install --no-cache-dir (.+)$", CONTAINERFILE, re.MULTILINE)
    subprocess.run([sys.executable, "-m", "venv", place], check=True)
    arguments = [word.strip("'") for word in install.split()]
    subprocess.run([place / "bin" / "pip", "install", "--quiet", *arguments], cwd=source, env=PLAIN, check=True)
    shutil.rmtree(source)
    return place / "bin"


def run(installed: Path, folder: Path, *arguments: str) -> str:
    """Runs its command in an empty home; returns what it said."""
    environment = {**PLAIN, "HOME": str(folder), "HF_HUB_OFFLINE": "1", "PATH": f"{installed}:{os.defpath}"}
    done = subprocess.run(
        [installed / arguments[0], *arguments[1:]], cwd=folder, env=environment, capture_output=True, text=True,
        timeout=900, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def test_the_product_alone_says_where_the_demo_is(installed: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        [installed / "rollout-buffer", "demo"], cwd=tmp_path, env=PLAIN, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert "demo belongs to the package rollout-buffer-lab, which is not installed: pip install" in done.stderr
    find = "import importlib.util as u; print(u.find_spec('rollout_buffer_lab'))"
    assert run(installed, tmp_path, "python", "-c", find).strip() == "None"


def test_the_command_says_its_version_and_the_package_is_typed(installed: Path, tmp_path: Path) -> None:
    assert re.search(r"\d+\.\d+", run(installed, tmp_path, "rollout-buffer", "--version"))
    code = (
        "import slime_plugins.rollout_buffer as it, pathlib; print(pathlib.Path(it.__path__[0], 'py.typed').is_file())"
    )
    assert run(installed, tmp_path, "python", "-c", code).strip() == "True"


def test_input_is_given_its_ids_by_the_installed_tool(installed: Path, tmp_path: Path) -> None:
    (tmp_path / "lines.jsonl").write_text('{"prompt": "1 + 1"}\n')
    tool = "slime_plugins.rollout_buffer.tools.assign_instance_id"
    run(installed, tmp_path, "python", "-m", tool, "--input_path", "lines.jsonl")
    assert json.loads((tmp_path / "lines_instance_id.jsonl").read_text())["instance_id"]


@pytest.fixture
def served(installed: Path, tmp_path: Path) -> Iterator[str]:
    """The image's own command, on a port of its own; yields the address."""
    (arguments,) = re.findall(r"^CMD (\[.+\])$", CONTAINERFILE, re.MULTILINE)
    words = [str(word).replace("/data", str(tmp_path / "data")) for word in json.loads(arguments)]
    words = [str(tmp_path / "token") if word == "/token" else word for word in words]
    (tmp_path / "data").mkdir()
    (tmp_path / "token").write_text("a-token-of-sixteen-or-more-letters\n")
    port = free_port()
    command = [str(installed / "rollout-buffer"), *words, "--port", str(port)]
    process = ChildProcess("buffer", command, log_file=tmp_path / "serve.log", environment={"PYTHONPATH": ""})
    wait_until(lambda: answers(f"http://127.0.0.1:{port}/health"), 90, f"start\n{process.log_tail(20)}")
    yield f"http://127.0.0.1:{port}"
    process.stop(40)


def test_the_image_serves_the_whole_dashboard_and_its_generators(served: str) -> None:
    folder = ROOT / "slime_plugins" / "rollout_buffer" / "dashboard"
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path.suffix in (".js", ".css", ".svg", ".html"):
            name = path.relative_to(folder).as_posix()
            reply = requests.get(f"{served}/dashboard/{name}", timeout=30)
            assert (reply.status_code, reply.content) == (200, path.read_bytes()), name
    client = RolloutBufferClient(served, token="a-token-of-sixteen-or-more-letters")
    assert {"math", "android_world", "statelm", "remote_rollout"} <= set(client.health()["task_types"])


TRAINER = """
import sys
from mock_trainer import MockTrainer, trainer_args

url, engine, tokenizer, lines = sys.argv[1:]
trainer = MockTrainer(trainer_args(
    rollout_buffer_url=url, rollout_buffer_token="a-token-of-sixteen-or-more-letters", prompt_data=lines,
    hf_checkpoint=tokenizer, sglang_router_port=int(engine), rollout_task_type="math",
    rollout_batch_size=2, num_epoch=4,
))
for record in trainer.train(2, save_interval=None):
    print("trained", len(record.samples))
"""


def test_math_an_external_job_and_slimes_function_run_on_the_wheel_alone(
    installed: Path, served: str, stand_in_engine: int, tmp_path: Path
) -> None:
    """The engine and the trainer are somebody else's: processes, and a file, outside of that environment."""
    shutil.copy(ROOT / "lab" / "src" / "rollout_buffer_lab" / "mock_trainer.py", tmp_path)
    lines = shutil.copy(ROOT / "data" / "demo_math.jsonl", tmp_path / "data")
    (tmp_path / "train.py").write_text(TRAINER)
    tokenizer = str(DEMO_TOKENIZER_PATH)
    said = run(installed, tmp_path, "python", "train.py", served, str(stand_in_engine), tokenizer, str(lines))
    assert said.count("trained 8") == 2

    client = RolloutBufferClient(served, token="a-token-of-sixteen-or-more-letters")
    payload = {"task_type": "external", "instances": [{"instance_id": "a"}], "num_repeat_per_sample": 1}
    job = client.start_rollout(payload)
    item = {"uid": "u", "instance_id": "a", "messages": [{"role": "user", "content": "?"}], "reward": 1.0}
    client.write([item], job_id=job.job_id)
    assert [found.uid for found in client.get_rollout_data(job_id=job.job_id).items] == ["u"]
