"""`isobit gate model --model` takes a user's checkpoint or factory, and sweeps batch size and padding.

The sweep is kept for an enabled model, broken for stock and for a planted model, and counts what it compares.
"""

import json
import sys

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

import isobit
from isobit.cli.main import main
from isobit.errors import ArgumentError
from isobit.gates.model.batch_layouts import IsobitScorer, StockScorer, draw_samples
from isobit.gates.model.sweep import Sweep, run_sweep, windows_of
from isobit.integrations.transformers import enabling
from isobit.integrations.transformers.parts import rotary
from tests.cli.test_gate_model_device import enabled_unwatched

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 128,
}
FACTORY = """
import torch
from transformers import LlamaConfig, LlamaForCausalLM

def make():
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**{sizes!r}))

def with_batch():
    return make(), torch.zeros(2, 3, dtype=torch.int64)

def zeros():
    model = make()
    for parameter in model.parameters():
        parameter.data.zero_()
    return model

def half():
    return make().half()

def with_lora():
    import peft
    lora = peft.LoraConfig(r=4, target_modules="all-linear", lora_dropout=0.2, init_lora_weights=False)
    return peft.get_peft_model(make(), lora)

def frozen():
    return make().requires_grad_(False)

def layer():
    return torch.nn.Linear(2, 2)

def number():
    return 3

def raises():
    raise SystemExit(0)
"""


def build():
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SIZES)).eval()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A checkpoint whose generation settings would end a sample at its first token."""
    folder = tmp_path_factory.mktemp("checkpoint")
    model = build()
    model.generation_config.eos_token_id = list(range(SIZES["vocab_size"]))
    model.save_pretrained(folder)
    return folder


@pytest.fixture
def factories(tmp_path):
    path = tmp_path / "their_models.py"
    path.write_text(FACTORY.format(sizes=SIZES))
    return path


SWEEP = Sweep((1, 3, 4), (0, 5), (3, 19, 5, 11, 4), seeds=2)


def draws_of(sweep):
    return [draw_samples(SIZES["vocab_size"], seed, sweep.lengths) for seed in range(sweep.seeds)]


def test_every_batch_size_and_padding_gives_the_same_bits_and_stock_does_not():
    model, heard = build(), []
    with isobit.enabled(model):
        ours = run_sweep(IsobitScorer(model), draws_of(SWEEP), SWEEP, heard.append)
    assert ours.kept, [row.where for row in ours.rows if not row.kept]
    assert len(heard) == SWEEP.steps == 2 * 3 * 3
    # Per seed: 2 paddings on 2 sides and packed; of them, padded right by 0 is the reference of a backward.
    numbers = sum(p.numel() for p in model.parameters())
    rows = {(row.quantity, row.layout.split(",")[0]): row for row in ours.rows}
    assert len(rows) == 9
    tokens = [length - 1 for length in SWEEP.lengths]
    seen = {
        1: sum(tokens),
        3: sum(tokens[:3]) + sum(tokens[2:]),
        4: sum(tokens[:4]) + sum(tokens[1:]),
    }
    for size, count in seen.items():
        assert rows["log-probability", f"B={size}"].numbers == 2 * 5 * count
        assert rows["loss", f"B={size}"].numbers == 2 * 4
        assert rows["gradient", f"B={size}"].numbers == 2 * 4 * numbers
    stock = run_sweep(StockScorer(model), draws_of(SWEEP), SWEEP)
    assert not stock.kept
    assert {row.quantity for row in stock.rows if row.differ} >= {"log-probability", "gradient"}


def test_windows_are_full_and_cover_every_sample():
    for count in range(1, 9):
        for size in range(1, count + 1):
            found = windows_of(count, size)
            assert {len(held) for held in found} == {size}
            assert {i for held in found for i in held} == set(range(count))


def test_a_planted_model_goes_red_at_one_padding_only(monkeypatch, checkpoint, capsys):
    """Its angles change where a row is 70 tokens or longer, which no fixed layout reaches."""
    forward = rotary.forward_rotary

    def shifted(module, x, position_ids):
        cos, sin = forward(module, x, position_ids)
        return cos * (1 + (x.shape[1] >= 70) * 2.0**-20), sin

    monkeypatch.setattr(rotary, "forward_rotary", shifted)
    monkeypatch.setattr(enabling, "enabled", enabled_unwatched)
    words = ["gate", "model", "--model", str(checkpoint), "-q", "--no-stock"]
    assert main(words) == 0
    assert main([*words, "--pad", "0,64", "--lengths", "19,3"]) == 1
    said = capsys.readouterr().out
    assert "BROKEN: log-probability, B=1" in said
    assert "B=1, 64 tokens of padding on the right" in said
    assert "BROKEN: gradient" in said


def test_a_checkpoint_folder_is_judged_with_stock_as_control(checkpoint, capsys):
    words = ["gate", "model", "--model", str(checkpoint), "-q", "--json"]
    assert main([*words, "--batch", "1..2", "--pad", "0,1", "--seeds", "2"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["kept"]
    assert record["dtype"] == "float32"
    assert record["isobit"]["trained"] == record["isobit"]["parameters"] == 12
    assert len(record["isobit"]["rows"]) == 26 + 2 * 3
    generated = [r for r in record["isobit"]["rows"] if r["layout"].startswith("generate")]
    assert [row["numbers"] for row in generated] == [24]
    assert any(row["differ"] for row in record["stock"]["rows"])


@pytest.mark.parametrize("name", ["make", "with_batch"])
def test_a_factory_of_a_file_is_judged(factories, capsys, name):
    inputs = factories.with_name("samples.jsonl")
    inputs.write_text('{"input_ids": [1, 2, 3, 4]}\n{"input_ids": [5, 6, 7]}\n')
    words = [
        "gate",
        "model",
        "--model",
        f"{factories}:{name}",
        "--inputs",
        str(inputs),
        "--pad",
        "0",
        "-q",
    ]
    assert main([*words, "--no-stock", "--dtype", "bf16"]) == 0
    assert "bfloat16, 12 of 12 parameters with gradients: kept" in capsys.readouterr().out


def test_adapters_with_dropout_are_judged_in_training(factories, capsys):
    inputs = factories.with_name("samples.jsonl")
    inputs.write_text('{"input_ids": [1, 2, 3, 4]}\n{"input_ids": [5, 6, 7]}\n')
    words = ["--model", f"{factories}:with_lora", "--inputs", str(inputs), "--pad", "0", "-q"]
    assert main(["gate", "model", *words, "--no-stock"]) == 0
    assert (
        "14 of 14 parameters with gradients (12 more are frozen): kept" in capsys.readouterr().out
    )


REFUSED = {
    "no such file": ["--model", "nowhere.py:make"],
    "no such module": ["--model", "isobit_nowhere:make"],
    "no such folder": ["--model", "./nowhere"],
    "no such function": ["--model", "FILE:other"],
    "all frozen": ["--model", "FILE:frozen"],
    "no language model": ["--model", "FILE:layer"],
    "no model": ["--model", "FILE:number"],
    "raises": ["--model", "FILE:raises"],
    "fp16": ["--model", "FILE:half"],
    "all zero": ["--model", "FILE:zeros"],
    "too few samples": ["--model", "FILE:make", "--batch", "3", "--lengths", "4,5"],
    "two tokens": ["--model", "FILE:make", "--lengths", "2,5"],
    "no batch": ["--model", "FILE:make", "--batch", "0"],
    "no seed": ["--model", "FILE:make", "--seeds", "0"],
    "token out of range": ["--model", "FILE:make", "--inputs", "INPUTS"],
    "inputs and lengths": ["--model", "FILE:make", "--inputs", "INPUTS", "--lengths", "4,5"],
    "a target takes days": ["--model", "FILE:make", "--device", "sm_90"],
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_judged_is_exit_2_with_a_remedy(factories, capsys, case):
    (inputs := factories.with_name("samples.jsonl")).write_text('{"input_ids": [1, 2, 128]}\n')
    named = {"FILE": str(factories), "INPUTS": str(inputs)}
    words = [
        word.replace("FILE", named["FILE"]).replace("INPUTS", named["INPUTS"])
        for word in REFUSED[case]
    ]
    assert main(["gate", "model", *words, "-q", "--no-stock"]) == 2
    said = capsys.readouterr()
    assert "Traceback" not in said.err
    assert "kept" not in said.out
    assert all(word in said.err for word in ("expected", "received", "remedy"))


def test_an_unsupported_family_is_sent_to_audit(tmp_path, capsys):
    GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=1, n_head=2, vocab_size=96)).save_pretrained(
        tmp_path
    )
    assert main(["gate", "model", "--model", str(tmp_path), "-q"]) == 2
    said = capsys.readouterr().err
    assert "GPT2LMHeadModel" in said
    assert f"isobit audit {tmp_path}" in said


def test_code_of_a_checkpoint_folder_is_not_run(checkpoint, tmp_path, monkeypatch, capsys):
    """Nor does transformers ask on the terminal whether to run it."""
    monkeypatch.setattr(sys, "stdin", None)
    config = json.loads((checkpoint / "config.json").read_text())
    config |= {
        "model_type": "theirs",
        "auto_map": {"AutoConfig": "code.C", "AutoModelForCausalLM": "code.M"},
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "code.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    assert main(["gate", "model", "--model", str(tmp_path), "-q"]) == 2
    said = capsys.readouterr()
    assert "custom code" in said.err
    assert "Do you wish" not in said.out
    assert not (tmp_path / "ran").exists()


def test_the_model_is_as_it_was_afterwards():
    model = build()
    own = model.generation_config
    with isobit.enabled(model):
        run_sweep(IsobitScorer(model), draws_of(SWEEP)[:1], Sweep((2,), (1,), SWEEP.lengths))
    assert model.generation_config is own
    assert all(p.grad is None for p in model.parameters())
    assert enabling.find_state(model) is None


@pytest.mark.parametrize(
    "wrong", [{"batches": ()}, {"pads": (-1,)}, {"lengths": ()}, {"batches": (5,)}, {"seeds": 0}]
)
def test_a_sweep_of_nothing_is_an_error(wrong):
    with pytest.raises(ArgumentError):
        Sweep(**wrong)


@pytest.mark.parametrize("words", [["gate"], ["gate", "modl"], ["gate", "--help"]])
def test_gate_alone_says_what_there_is(words, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(words)
    said = capsys.readouterr()
    assert "{model,training}" in said.out + said.err
    assert stopped.value.code == (0 if "--help" in words else 2)


@pytest.mark.parametrize(
    "text", ["", "a", "1..", "..3", "3..1", "1..99999999", "1,,2", "-1", "1e3"]
)
def test_numbers_that_are_none_are_refused(text, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["gate", "model", f"--batch={text}"])
    assert stopped.value.code == 2


@pytest.mark.full
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_wide_sweep(checkpoint, dtype):
    words = ["gate", "model", "--model", str(checkpoint), "--dtype", dtype, "-q", "--no-stock"]
    assert main([*words, "--batch", "1..8", "--pad", "0..64", "--seeds", "2"]) == 0
