"""`vllm serve` with isobit's worker is kept on every axis of `isobit audit --server`; stock vLLM is not.

The servers run in the environment that ./setup_vllm makes.
"""

import json

import pytest

from benchmarks import vllm as rollouts
from isobit.cli.main import main
from isobit.server_records import AXES
from tests.vllm.served import ISOBIT, STOCK, make_prompts, serve

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(not rollouts.PYTHON.exists(), reason="needs ./setup_vllm (3.5 GB)"),
]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Return a folder with a model and prompts."""
    place = tmp_path_factory.mktemp("served")
    rollouts.save_model("Qwen3", "bfloat16", place / "model")
    lines = [json.dumps({"input_ids": prompt}) for prompt in make_prompts(16, 160)]
    (place / "prompts.jsonl").write_text("\n".join(lines))
    return place


@pytest.mark.parametrize(("name", "options"), [("isobit", ISOBIT), ("stock", STOCK)])
def test_served_log_probabilities(name, options, place, capsys):
    page = place / f"{name}.html"
    words = ["--inputs", str(place / "prompts.jsonl"), "--html", str(page), "--timeout", "300"]
    with serve(place / "model", options, place / f"{name}.log") as address:
        command = ["audit", "--server", address, "--model", "tiny", "-q", *words]
        codes = main(command), main([*command, "--json", "--vary", "batch,concurrency"])
    said, record = capsys.readouterr().out.split("\n{\n", 1)
    with capsys.disabled():
        print(said)
    found = json.loads("{" + record)
    assert set(AXES) <= set(said.split())
    assert "exact fp32 values" in said
    if name == "isobit":
        assert codes == (0, 0), said
        assert "kept on repeats, batch, order, prefix-cache, concurrency" in said
    else:
        assert codes == (1, 1), said
        assert "batch" in found["sentence"]
    assert "after /reset_prefix_cache" in said
    assert sum(one["values"] for one in found["audit"]["variants"]) > 20_000
