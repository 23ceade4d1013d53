"""`isobit audit`: what it is pointed at, what it writes, and its exit codes."""

import json

import pytest
import torch

from isobit.auditing.judging.blame import BY
from isobit.cli.audit import BLAMES
from isobit.cli.main import main

FACTORY = """
import torch, isobit
def ours():
    return isobit.nn.Linear(8, 4), torch.randn(3, 8)
def mixing():
    return torch.nn.BatchNorm1d(8), torch.randn(3, 8, 2)
def wrong():
    return 3
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "subjects_of_audit.py").write_text(FACTORY)
    (tmp_path / "train.py").write_text(
        "import torch, isobit, sys\n"
        "model = isobit.nn.Linear(8, int(sys.argv[1]))\n"
        "model(torch.randn(4, 8)).sum().backward()\n"
    )
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_options_name_every_way_of_blaming():
    assert ("auto", *BY) == BLAMES


def test_exit_codes(folder, capsys):
    axis = ["--vary", "batch", "-q"]
    assert main(["audit", "subjects_of_audit:ours", *axis]) == 0
    assert main(["audit", "subjects_of_audit.py:mixing", *axis]) == 1
    assert "native_batch_norm" in capsys.readouterr().out
    assert main(["audit", "subjects_of_audit:ours", "--vary", "decode", "-q"]) == 2


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["nothing.py"], "no such file"),
        (["subjects_of_audit:absent"], "package.module:factory"),
        (["subjects_of_audit.py:absent"], "file.py:factory"),
        (["nothing.py:ours"], "no such file: nothing.py"),
        (["subjects_of_audit:wrong"], "to return (model, batch)"),
        (["no/such/folder"], "a folder or hub id"),
    ],
)
def test_what_cannot_be_audited_is_said(folder, capsys, words, said):
    assert main(["audit", *words, "-q"]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("words", [["--vary", "bach"], ["--shape", "8"], ["--shape", "0x3"]])
def test_unknown_words_are_refused(folder, words):
    with pytest.raises(SystemExit) as raised:
        main(["audit", "subjects_of_audit:ours", *words])
    assert raised.value.code == 2


def test_a_script_gets_its_words(folder, capsys):
    assert main(["audit", "train.py", "--vary", "batch", "--json", "-q", "--", "5"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["axes"][0]["judged"] == 1
    assert record["provenance"]["command"].endswith("-- 5")


def test_files_are_written(folder):
    words = ["--html", "a.html", "--sarif", "a.sarif", "--orders", "0", "-q"]
    assert main(["audit", "subjects_of_audit:mixing", "--vary", "batch", *words]) == 1
    assert "native_batch_norm" in (folder / "a.html").read_text()
    assert json.loads((folder / "a.sarif").read_text())["version"] == "2.1.0"


def test_a_folder_of_transformers_with_prompts(folder, capsys):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}
    config = transformers.Qwen3Config(vocab_size=64, **sizes, **heads)
    transformers.Qwen3ForCausalLM(config).save_pretrained("model")
    lines = [{"input_ids": [1, 2, 3, 4, 5]}, {"input_ids": [6, 7, 8]}]
    (folder / "prompts.jsonl").write_text("\n".join(map(json.dumps, lines)))
    words = ["--inputs", "prompts.jsonl", "--vary", "batch,padding", "--json", "-q"]
    assert main(["audit", "model", "--enable", "--sample", "1", *words]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["inputs"] == "2 samples of 5 tokens"
    assert [axis["complete"] for axis in record["axes"]] == [True, True]
    assert "2 padded positions" in record["axes"][1]["variation"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["audit", "-q"], "the following arguments are required: model"),
        (["audit", "net:make", "--vary", "order"], "expected axes among batch"),
        (["compare", "server", "http://127.0.0.1:9", "--tokens", "0"], "expected at least 1"),
        (["compare", "server", "http://127.0.0.1:9", "--timeout", "nan"], "expected seconds"),
        (["compare", "server", "http://127.0.0.1:9", "--repeats", "10000000"], "expected a number"),
    ],
)
def test_options_that_a_command_does_not_have_are_refused(words, said, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(words)
    assert stopped.value.code == 2
    assert said in capsys.readouterr().err
