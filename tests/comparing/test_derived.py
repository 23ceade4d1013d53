"""Theorem: `isobit compare derived` finds every corrupted checkpoint by tensor and cause, and no right one wrong."""

import json
import re
import shutil
from fractions import Fraction

import pytest
import torch
import yaml
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from isobit.cli.main import main
from isobit.comparing.derived.merged import check_merged
from isobit.comparing.derived.packed import AWQ_COLUMNS, unpack
from isobit.comparing.derived.pruned import Pruning, check_pruned
from isobit.comparing.derived.quantised import check_quantised
from isobit.errors import ArgumentError

HALF = Pruning(Fraction(1, 2))
LAYERS = [f"layers.{i}.{n}.weight" for i in range(2) for n in ("q_proj", "down_proj")]


def model(seed=0, dtype=torch.bfloat16, noise=0.0):
    """A base, or a model near it."""
    make = torch.Generator().manual_seed(7)
    shapes = dict.fromkeys(LAYERS, (32, 64)) | {"embed_tokens.weight": (48, 64)}
    found = {name: torch.randn(shape, generator=make) for name, shape in shapes.items()}
    found |= {
        "layers.0.norm.weight": torch.ones(64),
        "lm_head.weight": found["embed_tokens.weight"] * 2,
    }
    if noise:
        make = torch.Generator().manual_seed(seed)
        found = {n: x + noise * torch.randn(x.shape, generator=make) for n, x in found.items()}
    return {name: x.to(dtype) for name, x in found.items()}


def write(folder, tensors, **config):
    folder.mkdir(exist_ok=True)
    save_file({n: x.contiguous() for n, x in tensors.items()}, folder / "model.safetensors")
    if config:
        (folder / "config.json").write_text(json.dumps({"quantization_config": config}))
    return folder


def causes(found):
    return {one.name: one.cause for one in found.wrong}


# ---- pruned


def pruned(tensors, n_m=None):
    found = dict(tensors)
    for name in LAYERS:
        w = tensors[name].clone()
        groups = w.reshape(len(w), -1, n_m[1] if n_m else w.shape[1])
        drop = groups.shape[-1] - n_m[0] if n_m else groups.shape[-1] // 2
        least = groups.abs().float().argsort(dim=-1, stable=True)[..., :drop]
        found[name] = groups.scatter(-1, least, 0).reshape(w.shape)
    return found


def as_bitmask(tensors):
    """The layout of compressed-tensors' sparse models."""
    found = {}
    for name, w in tensors.items():
        if name not in LAYERS:
            found[name] = w
            continue
        kept = (w != 0).reshape(len(w), -1, 8)
        found[f"{name}.bitmask"] = (kept * (1 << torch.arange(8))).sum(-1).to(torch.uint8)
        found[f"{name}.compressed"] = w[w != 0]
        found[f"{name}.shape"] = torch.tensor(w.shape)
    return found


def as_masks(tensors, base):
    """The layout of torch.nn.utils.prune before `remove`."""
    found = {n: w for n, w in tensors.items() if n not in LAYERS}
    for name in LAYERS:
        found[f"{name}_orig"], found[f"{name}_mask"] = (
            base[name],
            (tensors[name] != 0).to(torch.bfloat16),
        )
    return found


def test_pruned_checkpoints_are_as_stated_in_every_layout(tmp_path):
    base = write(tmp_path / "base", model())
    plain, by_groups = pruned(model()), pruned(model(), (2, 4))
    for number, tensors in enumerate((plain, as_bitmask(plain), as_masks(plain, model()))):
        found = check_pruned(write(tmp_path / f"p{number}", tensors), HALF, base)
        assert not found.wrong, causes(found)
        assert {one.name for one in found.of("as stated")} == set(LAYERS)
    found = check_pruned(write(tmp_path / "g", by_groups), Pruning(Fraction(1, 2), (2, 4)), base)
    assert (len(found.wrong), len(found.of("as stated")), found.exit_code) == (0, 4, 0)


def test_corrupted_pruned_checkpoints_are_named(tmp_path):
    base = write(tmp_path / "base", model())
    name = LAYERS[1]

    def broken(change, stated=HALF, n_m=None):
        tensors = {n: w.clone() for n, w in pruned(model(), n_m).items()}
        change(tensors)
        found = check_pruned(write(tmp_path / "bad", tensors), stated, base)
        assert found.exit_code == 1
        return causes(found)

    def one_back(t):
        at = (t[name] == 0).nonzero()[5]
        t[name][tuple(at)] = model()[name][tuple(at)]

    def one_more(t):
        at = (t[name] != 0).nonzero()[5]
        t[name][tuple(at)] = 0

    assert broken(lambda t: t.update({name: model()[name]}))[name].startswith(
        "not pruned: 0 of 2,048"
    )
    assert broken(one_back)[name].startswith("fewer zeros")
    assert broken(one_more)[name].startswith("more zeros")
    assert "groups of 4 have more than 2" in broken(one_back, Pruning(None, (2, 4)), (2, 4))[name]
    turned = broken(
        lambda t: t.update(
            {name: pruned({**model(), name: model()[name].mT.contiguous()}, (2, 4))[name].mT}
        ),
        Pruning(None, (2, 4)),
        (2, 4),
    )
    assert turned[name].startswith("groups run along columns")
    assert "kept weights differ" in broken(lambda t: t[name].mul_(1.5))[name]
    other = broken(lambda t: t["lm_head.weight"][0].zero_())
    assert other == {"lm_head.weight": "no target, but not the base's bits"}
    gone = broken(lambda t: t.pop("layers.0.norm.weight"))
    assert gone == {"layers.0.norm.weight": "the base has it, this checkpoint does not"}


def test_a_statement_about_nothing_is_no_pass(tmp_path, capsys):
    path = write(tmp_path / "m", {"embed_tokens.weight": torch.ones(4, 4)})
    assert main(["compare", "derived", str(path), "--sparsity", "0.5", "--quiet"]) == 1
    assert "NOTHING TO CHECK" in capsys.readouterr().out
    assert main(["compare", "derived", str(path), "--quiet"]) == 2


# ---- quantised: every layout, written here from round to nearest


def pack(codes, bits):
    """Pack unsigned numbers densely along the last axis."""
    count = codes.shape[-1]
    words = torch.zeros(*codes.shape[:-1], -(-count * bits // 32) + 1, dtype=torch.int64)
    for i in range(count):
        at, shift = divmod(i * bits, 32)
        wide = codes[..., i].long() << shift
        words[..., at] |= wide & 0xFFFFFFFF
        words[..., at + 1] |= wide >> 32
    words = words[..., :-1]
    return torch.where(words >= 1 << 31, words - (1 << 32), words).int()


@pytest.mark.parametrize("bits", [1, 2, 3, 4, 5, 8])
def test_packed_numbers_are_unpacked(bits):
    codes = torch.randint(0, 1 << bits, (3, 64), generator=torch.Generator().manual_seed(bits))
    assert torch.equal(unpack(pack(codes, bits), bits, 64), codes)


def rounded(w, bits=4, group=16, zero=False, dtype=torch.float16):
    """Return signed codes [N, K], scales [N, G], unsigned zero points [N, G] by round to nearest."""
    g = w.float().reshape(len(w), -1, group)
    if zero:
        low, high = g.amin(-1).clamp(max=0), g.amax(-1).clamp(min=0)
        scale = ((high - low) / (2**bits - 1)).to(dtype)
        point = (-low / scale.float()).round().clamp(0, 2**bits - 1)
    else:
        scale = (g.abs().amax(-1) / (2 ** (bits - 1) - 1)).to(dtype)
        point = torch.full_like(scale, 2.0 ** (bits - 1)).float()
    q = (g / scale.float().unsqueeze(-1)).round() + point.unsqueeze(-1)
    return q.clamp(0, 2**bits - 1).reshape(w.shape).long(), scale, point.long()


def compressed(bits=4, zero=False):
    def make(w, stem):
        q, scale, point = rounded(w, bits, 16, zero)
        found = {
            "weight_packed": pack(q, bits),
            "weight_scale": scale,
            "weight_shape": torch.tensor(w.shape),
        }
        if zero:
            found["weight_zero_point"] = pack(point.mT, bits).mT
        return {f"{stem}.{k}": v for k, v in found.items()}

    return make


def gptq(w, stem, bits=4):
    q, scale, point = rounded(w, bits, 16, True)
    found = {
        "qweight": pack(q, bits).mT,  # packed along inputs
        "scales": scale.mT,
        "qzeros": pack(point.mT - 1, bits),
        "g_idx": torch.arange(w.shape[1]).int() // 16,
    }
    return {f"{stem}.{k}": v for k, v in found.items()}


def in_order(x):
    return x.reshape(len(x), -1, 8)[..., list(AWQ_COLUMNS)].reshape(len(x), -1)


def awq(w, stem):
    q, scale, point = rounded(w, 4, 16, True)
    found = {
        "qweight": pack(in_order(q.mT), 4),
        "scales": scale.mT,
        "qzeros": pack(in_order(point.mT), 4),
    }
    return {f"{stem}.{k}": v for k, v in found.items()}


def torchao(w, stem):
    q, scale, point = rounded(w, 8, 64, False, torch.float32)
    return {f"{stem}._weight_qdata": (q - point).to(torch.int8), f"{stem}._weight_scale": scale}


def fp8(w, stem):
    scale = w.float().abs().amax(1, True) / 448
    return {
        f"{stem}.weight": (w.float() / scale).to(torch.float8_e4m3fn),
        f"{stem}.weight_scale": scale,
    }


LAYOUTS = {
    "compressed": compressed(),
    "compressed 3 bits": compressed(3),
    "compressed with zero points": compressed(zero=True),
    "gptq": gptq,
    "awq": awq,
    "torchao": torchao,
    "fp8": fp8,
}


def quantised(make, tensors=None, names=LAYERS):
    found = dict(tensors or model())
    for name in names:
        found |= make(found.pop(name), name.removesuffix(".weight"))
    return found


@pytest.mark.parametrize("layout", LAYOUTS)
def test_quantised_checkpoints_are_as_stated_in_every_layout(tmp_path, layout):
    base = write(tmp_path / "base", model())
    found = check_quantised(write(tmp_path / "q", quantised(LAYOUTS[layout])), base, nearest=True)
    assert not found.wrong, causes(found)
    assert {one.name for one in found.of("as stated")} == set(LAYERS)


STEM = LAYERS[1].removesuffix(".weight")


def neighbours_scale(t):
    t[f"{STEM}.scales"] = t[f"{STEM}.scales"].roll(1, 0)


def zero_off_by_one(t):
    t[f"{STEM}.qzeros"] = t[f"{STEM}.qzeros"] + 0x11111111 * 0 + 1  # one nibble


def zeros_of_format_2(t):
    points = unpack(t[f"{STEM}.qzeros"], 4, 32) + 1
    t[f"{STEM}.qzeros"] = pack(points.clamp(max=15), 4)


def other_layers_codes(t):
    for part in ("qweight", "scales", "qzeros"):
        t[f"{STEM}.{part}"] = t[f"{LAYERS[3].removesuffix('.weight')}.{part}"].clone()


def swapped_nibbles(t):
    words = t[f"{STEM}.qweight"].long() & 0xFFFFFFFF
    words = ((words & 0x0F0F0F0F) << 4) | ((words >> 4) & 0x0F0F0F0F)
    t[f"{STEM}.qweight"] = torch.where(words >= 1 << 31, words - (1 << 32), words).int()


def nan_scale(t):
    t[f"{STEM}.scales"][1, 3] = torch.nan


def one_code(t):
    t[f"{STEM}.qweight"][2, 3] ^= 0x00400000


def norm_changed(t):
    t["layers.0.norm.weight"][3] = 1.5


def groups_reversed(t):
    t[f"{STEM}.g_idx"] = t[f"{STEM}.g_idx"].flip(0)


def tensor_missing(t):
    t.pop("embed_tokens.weight")


CORRUPTED = {
    neighbours_scale: (STEM, "scale of the group before"),
    zero_off_by_one: (STEM, "zero point one too large"),
    zeros_of_format_2: (STEM, "zero point one too large"),
    other_layers_codes: (STEM, "codes of layers.1.down_proj.weight"),
    swapped_nibbles: (STEM, "neighbouring codes swapped"),
    nan_scale: (STEM, "the scale of row 3, group 1 is nan"),
    one_code: (STEM, "1 of 2,048 weights"),
    norm_changed: ("layers.0.norm", "not quantised, but 1 elements differ"),
    groups_reversed: (STEM, "groups in another sequence"),
    tensor_missing: ("embed_tokens", "the base has it"),
}


@pytest.mark.parametrize("change", CORRUPTED, ids=lambda c: c.__name__)
def test_corrupted_quantised_checkpoints_are_named(tmp_path, change):
    base = write(tmp_path / "base", model())
    tensors = {n: x.clone() for n, x in quantised(gptq).items()}
    change(tensors)
    found = check_quantised(write(tmp_path / "q", tensors), base)
    stem, cause = CORRUPTED[change]
    assert list(causes(found)) == [f"{stem}.weight"]
    assert cause in causes(found)[f"{stem}.weight"]


def test_codes_that_were_not_rounded_to_nearest_are_told_apart(tmp_path):
    """GPTQ's compensation is accepted unless --nearest; a shifted zero point in it is still found."""
    base = write(tmp_path / "base", model())
    moved = model()
    make = torch.Generator().manual_seed(1)
    for name in LAYERS:  # as if error had been moved between columns
        step = moved[name].float().abs().amax() / 15
        shift = 0.35 * step * torch.randn(moved[name].shape, generator=make)
        moved[name] = (moved[name].float() + shift).bfloat16()
    tensors = {**quantised(gptq, moved)}
    path = write(tmp_path / "q", tensors)
    found = check_quantised(path, base)
    assert not found.wrong, causes(found)
    assert len(check_quantised(path, base, nearest=True).wrong) == len(LAYERS)
    zeros_of_format_2(tensors)
    assert list(causes(check_quantised(write(tmp_path / "z", tensors), base))) == [LAYERS[1]]


def test_multiplied_columns_are_explained_by_their_factors(tmp_path):
    base = write(tmp_path / "base", model(dtype=torch.float32))
    factors = torch.linspace(0.5, 2.0, 64)
    moved = model(dtype=torch.float32)
    moved[LAYERS[0]] = moved[LAYERS[0]] * factors
    moved["layers.0.norm.weight"] = moved["layers.0.norm.weight"] / factors
    tensors = quantised(awq, moved)
    assert not check_quantised(write(tmp_path / "q", tensors), base).wrong
    tensors["layers.0.norm.weight"] = tensors["layers.0.norm.weight"].flip(0)
    assert list(causes(check_quantised(write(tmp_path / "q2", tensors), base))) == [
        "layers.0.norm.weight"
    ]


def test_a_layer_that_the_configuration_calls_quantised_is_wrong_if_plain(tmp_path):
    base = write(tmp_path / "base", model())
    config = {"config_groups": {"group_0": {"targets": ["Linear"]}}, "ignore": ["lm_head"]}
    tensors = quantised(compressed(), names=LAYERS[1:])
    found = check_quantised(write(tmp_path / "q", tensors, **config), base)
    assert list(causes(found)) == [LAYERS[0]]
    config["ignore"].append("re:.*layers.0.q_proj")
    assert not check_quantised(write(tmp_path / "q", tensors, **config), base).wrong


def test_layouts_that_are_not_decoded_are_refused_by_name(tmp_path):
    base = write(tmp_path / "base", model())
    nf4 = {
        "a.weight": torch.zeros(4, dtype=torch.uint8),
        "a.weight.quant_state.bitsandbytes__nf4": torch.ones(1),
    }
    with pytest.raises(ArgumentError, match="bitsandbytes"):
        check_quantised(write(tmp_path / "q", nf4), base)
    lying = quantised(gptq)
    lying[f"{STEM}.g_idx"] = lying[f"{STEM}.g_idx"] + 9
    with pytest.raises(ArgumentError, match="a group 12"):
        check_quantised(write(tmp_path / "l", lying), base)


# ---- merged


def config(path, method, models, parameters="", dtype="bfloat16", base=True):
    lines = [
        f"merge_method: {method}",
        f"dtype: {dtype}",
        *(["base_model: base"] if base else []),
        "models:",
    ]
    for name, weight, density in models:
        lines += [f"  - model: {name}", f"    parameters: {{weight: {weight}, density: {density}}}"]
    path.write_text("\n".join([*lines, parameters]))
    return path


MODELS = (("a", 0.3, 0.5), ("b", 0.4, 0.5), ("c", 0.5, 0.5))


def merged(method, dtype=torch.bfloat16, seed=3):
    """Merge as mergekit does, in the dtype of the models."""
    base = model(dtype=dtype)
    make = torch.Generator().manual_seed(seed)
    found = {}
    for name, b in base.items():
        each = [model(i + 1, dtype, 0.02)[name] for i in range(3)]
        w = torch.tensor([m[1] for m in MODELS]).to(dtype).reshape(-1, *[1] * b.dim())
        if method == "linear":
            found[name] = ((torch.stack(each) * w).sum(0) / w.sum(0)).to(dtype)
            continue
        d = torch.stack([x - b for x in each])
        if method == "ties":
            for i in range(3):
                least = d[i].flatten().abs().float().argsort(descending=True, stable=True)
                d[i].view(-1)[least[int(0.5 * b.numel()) :]] = 0
        if method.startswith("dare"):
            for i in range(3):
                kept = d[i] * (torch.rand(b.shape, generator=make) < 0.5)
                d[i] = kept * (d[i].abs().float().sum() / kept.abs().float().sum()).to(dtype)
        d = d * w
        if method.endswith("ties"):
            same = d.sign() == torch.where(d.sum(0) >= 0, 1, -1)
            total, divisor = (d * same).sum(0), (w * same).sum(0)
            divisor[divisor == 0] = 1
            found[name] = b + (total / divisor if method == "ties" else total)
        else:
            found[name] = b + d.sum(0)
    return found


@pytest.fixture
def sources(tmp_path):
    for number, name in enumerate(("base", "a", "b", "c")):
        for dtype in (torch.bfloat16, torch.float32):
            tensors = model(number, dtype, 0.02 if number else 0.0)
            (tmp_path / str(dtype)[6:]).mkdir(exist_ok=True)
            write(tmp_path / str(dtype)[6:] / name, tensors)
    return lambda dtype: [str(tmp_path / str(dtype)[6:] / name) for name in ("base", "a", "b", "c")]


METHODS = ("linear", "task_arithmetic", "ties", "dare_linear", "dare_ties")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.sweep(4)
def test_merged_checkpoints_are_as_stated(tmp_path, sources, method, dtype):
    file = config(
        tmp_path / "m.yaml", method, MODELS, dtype=str(dtype)[6:], base=method != "linear"
    )
    path = write(tmp_path / "merged", merged(method, dtype))
    places = sources(dtype)[method == "linear" :]
    found = check_merged(path, places, file)
    assert not found.wrong, causes(found)
    assert len(found.of("as stated")) == len(model())
    # As mergekit's Python interface writes it.
    written = yaml.safe_load(file.read_text())
    sources_of = [{**one, "layer_range": [0, 2]} for one in written.pop("models")]
    written["modules"] = {"default": {"slices": [{"sources": sources_of}]}}
    file.write_text(yaml.safe_dump(written))
    assert check_merged(path, places, file) == found


@pytest.mark.parametrize("method", METHODS)
def test_corrupted_merges_are_named(tmp_path, sources, method):
    """A tensor that was copied, merged with another weight, or merged without its base."""
    # In bf16 random masks and elected signs explain most small tensors: there fp32 is needed.
    dtype = torch.float32 if method == "dare_ties" else torch.bfloat16
    file = config(tmp_path / "m.yaml", method, MODELS, "", str(dtype)[6:], method != "linear")
    name, places = LAYERS[1], sources(dtype)[method == "linear" :]
    right = merged(method, dtype)
    copied = {**right, name: model(1, dtype, 0.02)[name]}
    found = causes(check_merged(write(tmp_path / "m1", copied), places, file))
    assert list(found) == [name]
    assert found[name].startswith("a copy of a, not merged")
    drift = (right[name].float() - model(dtype=dtype)[name].float()) * 1.5
    scaled = {**right, name: (model(dtype=dtype)[name].float() + drift).to(dtype)}
    assert list(causes(check_merged(write(tmp_path / "m2", scaled), places, file))) == [name]
    swapped = {**right, name: right[LAYERS[3]], LAYERS[3]: right[name]}
    found = causes(check_merged(write(tmp_path / "m3", swapped), places, file))
    assert sorted(found) == sorted((name, LAYERS[3]))


def test_wrong_weights_are_named_by_those_that_fit(tmp_path, sources):
    """In bf16 an element says little about weights of models that are 2 % apart; all of them together do."""
    other = tuple((n, w, d) for n, w, d in (("a", 0.5, 1), ("b", 0.4, 1), ("c", 0.3, 1)))
    for dtype in (torch.bfloat16, torch.float32):
        file = config(tmp_path / "m.yaml", "linear", other, dtype=str(dtype)[6:], base=False)
        path = write(tmp_path / "merged", merged("linear", dtype))
        found = causes(check_merged(path, sources(dtype)[1:], file))
        assert set(LAYERS) <= set(found)
        assert "explain it, 0.4167, 0.3333, 0.25 are stated" in found[LAYERS[0]]


def test_known_mistakes_of_ties_are_named(tmp_path, sources):
    path = write(tmp_path / "merged", merged("ties", torch.float32))
    places = sources(torch.float32)
    said = {}
    for key, parameters, models in (
        ("normalised", "parameters: {normalize: false}", MODELS),
        ("trimmed", "", [(n, w, 1.0) for n, w, _ in MODELS]),
        ("lambda", "parameters: {lambda: 0.5}", MODELS),
    ):
        file = config(tmp_path / "m.yaml", "ties", models, parameters, "float32")
        said[key] = causes(check_merged(path, places, file))[LAYERS[0]]
    assert said["normalised"].startswith("the sum was normalised: ")
    assert said["lambda"].startswith("lambda was left out: ")
    assert re.search("elements are not the merge", said["trimmed"])


def slerp_of(a, b, t):
    a, b = a.double(), b.double()
    angle = torch.acos(((a / a.norm()) * (b / b.norm())).sum())
    return (torch.sin((1 - t) * angle) * a + torch.sin(t * angle) * b) / torch.sin(angle)


def test_slerp_and_what_is_mistaken_for_it(tmp_path):
    a, b = (
        model(dtype=torch.float32),
        {n: x.roll(1, 0) + 1e-3 for n, x in model(dtype=torch.float32).items()},
    )
    write(tmp_path / "a", a), write(tmp_path / "b", b)
    (tmp_path / "m.yaml").write_text(
        "merge_method: slerp\nbase_model: a\nslices:\n- sources:\n  - {model: a, layer_range: [0, 2]}\n"
        "  - {model: b, layer_range: [0, 2]}\nparameters:\n  t:\n  - {filter: q_proj, value: [0, 1]}\n  - value: 0.25\n"
    )

    def t_of(name):
        return {"layers.0.q_proj.weight": 0.0, "layers.1.q_proj.weight": 1.0}.get(name, 0.25)

    right = {
        n: slerp_of(a[n], b[n], t_of(n)).float() if n != "layers.0.norm.weight" else None for n in a
    }
    n = "layers.0.norm.weight"  # parallel: interpolated linearly
    right[n] = (0.75 * a[n].double() + 0.25 * b[n].double()).float()
    places = [str(tmp_path / "a"), str(tmp_path / "b")]
    found = check_merged(write(tmp_path / "m", right), places, tmp_path / "m.yaml")
    assert not found.wrong, causes(found)
    wrong = {**right, LAYERS[1]: (0.75 * a[LAYERS[1]] + 0.25 * b[LAYERS[1]])}
    wrong[LAYERS[3]] = slerp_of(b[LAYERS[3]], a[LAYERS[3]], 0.25).float()
    found = causes(check_merged(write(tmp_path / "m2", wrong), places, tmp_path / "m.yaml"))
    assert found[LAYERS[1]].startswith("linear instead of spherical")
    assert found[LAYERS[3]].startswith("interpolated from the other end")
    assert len(found) == 2


def test_merges_that_are_not_repeated_are_refused_by_name(tmp_path, sources):
    path = write(tmp_path / "merged", merged("linear"))
    places = sources(torch.bfloat16)
    with pytest.raises(ArgumentError, match="merge_method: della"):
        check_merged(path, places, config(tmp_path / "m.yaml", "della", MODELS))
    with pytest.raises(ArgumentError, match="gamma"):
        check_merged(
            path, places, config(tmp_path / "m.yaml", "ties", MODELS, "parameters: {gamma: 1}")
        )
    with pytest.raises(ArgumentError, match="one path for the model c"):
        check_merged(path, places[:3], config(tmp_path / "m.yaml", "ties", MODELS))


HOSTILE_MERGES = {
    "deep": "[" * 3000,
    "models that are numbers": "merge_method: linear\nmodels: [1, 2]",
    "models that are one text": "merge_method: linear\nmodels: abc",
    "slices that are numbers": "merge_method: linear\nslices: [5]",
    "sources that are numbers": "merge_method: linear\nslices: [{sources: [5]}]",
    "a weight that is a text": "merge_method: linear\nmodels: [{model: a, parameters: {weight: x}}]",
    "a weight of mixed kinds": "merge_method: linear\nmodels: [{model: a, parameters: {weight: [1, {}]}}]",
    "no weights": "merge_method: linear\nmodels: [{model: a, parameters: {weight: []}}]",
    "nan": "merge_method: linear\nmodels: [{model: a, parameters: {weight: .nan}}]",
    "infinity": "merge_method: slerp\nbase_model: base\nmodels: [{model: a}]\nparameters: {t: .inf}",
    "filters without end": "merge_method: linear\nmodels: [{model: a, parameters: &p {weight: {value: *p}}}]",
    "modules that are numbers": "merge_method: linear\nmodules: 5",
    "no modules": "merge_method: linear\nmodules: {}",
    "a module that is a number": "merge_method: linear\nmodules: {default: 5}",
    "two modules": "merge_method: linear\nmodules: {a: {models: [{model: a}]}, b: {models: [{model: b}]}}",
    "a module next to models": "merge_method: linear\nmodels: [{model: a}]\nmodules: {d: {models: [{model: a}]}}",
    "parameters of a module": "merge_method: linear\nmodules: {d: {models: [{model: a}], parameters: {weight: 1}}}",
    "the base alone": "merge_method: ties\nbase_model: base\nmodels: [{model: base}]",
}


@pytest.mark.parametrize("how", HOSTILE_MERGES)
def test_hostile_configurations_of_merges_raise(how, tmp_path, sources):
    (tmp_path / "m.yaml").write_text(HOSTILE_MERGES[how])
    path = write(tmp_path / "merged", merged("linear"))
    with pytest.raises(ArgumentError):
        check_merged(path, sources(torch.bfloat16), tmp_path / "m.yaml")


@pytest.mark.parametrize("dtype", [torch.int64, torch.complex64])
def test_scales_that_are_no_numbers_of_a_float_dtype_raise(dtype, tmp_path):
    base, tensors = write(tmp_path / "base", model()), quantised(gptq)
    name = next(name for name in tensors if name.endswith("scales"))
    tensors[name] = tensors[name].to(dtype)
    with pytest.raises(ArgumentError, match="shapes and dtypes that fit"):
        check_quantised(write(tmp_path / "q", tensors), base)


def test_the_command_prints_tensor_and_cause(tmp_path, capsys):
    base = write(tmp_path / "base", model())
    tensors = quantised(gptq)
    nan_scale(tensors)
    path = write(tmp_path / "q", tensors)
    assert (
        main(["compare", "derived", str(path), "--quantised-from", str(base), "--quiet", "--json"])
        == 1
    )
    record = json.loads(capsys.readouterr().out)
    assert (
        record["sentence"]
        == "NOT AS STATED: 3 as stated, 1 wrong, 3 left as they were, of 7 tensors"
    )
    assert main(["compare", "derived", str(path), "--quantised-from", str(base), "--quiet"]) == 1
    assert "the scale of row 3, group 1 is nan" in capsys.readouterr().out.replace("\n", " ")


# ---- checkpoints that the tools themselves wrote; docs/results/post-training.md has their versions


def write_llama(folder):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": False}
    made = LlamaForCausalLM(LlamaConfig(vocab_size=64, **sizes, **heads)).to(torch.bfloat16)
    made.save_pretrained(folder)
    return folder


def by_llm_compressor(base, folder, scheme):
    pytest.importorskip("llmcompressor")
    from llmcompressor import oneshot
    from llmcompressor.modifiers.quantization import QuantizationModifier
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(base, dtype=torch.bfloat16)
    oneshot(
        model=model,
        recipe=[QuantizationModifier(targets="Linear", scheme=scheme, ignore=["lm_head"])],
    )
    model.save_pretrained(folder)


def by_torchao(base, folder, kind):
    quantization = pytest.importorskip("torchao.quantization")
    from transformers import LlamaForCausalLM, TorchAoConfig

    config = {
        "int8": lambda: quantization.Int8WeightOnlyConfig(version=2),
        "int4": lambda: quantization.IntxWeightOnlyConfig(
            weight_dtype=torch.int4, granularity=quantization.PerGroup(32)
        ),
    }[kind]()
    model = LlamaForCausalLM.from_pretrained(
        base, dtype=torch.bfloat16, quantization_config=TorchAoConfig(config)
    )
    model.save_pretrained(folder)


REAL = {
    "llm-compressor W4A16": lambda base, out: by_llm_compressor(base, out, "W4A16"),
    "llm-compressor W4A16_ASYM": lambda base, out: by_llm_compressor(base, out, "W4A16_ASYM"),
    "llm-compressor W8A8": lambda base, out: by_llm_compressor(base, out, "W8A8"),
    "torchao int8": lambda base, out: by_torchao(base, out, "int8"),
    "torchao int4": lambda base, out: by_torchao(base, out, "int4"),
}


def spoil_scale(tensors, stem):
    name = next(n for n in tensors if n.startswith(stem) and n.endswith("scale"))
    tensors[name] = tensors[name].roll(1, 0)


def spoil_norm(tensors, stem):
    tensors["model.norm.weight"] = tensors["model.norm.weight"].clone()
    tensors["model.norm.weight"][3] = 1.5


def drop_tensor(tensors, stem):
    tensors.pop("model.embed_tokens.weight")


@pytest.mark.full
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("tool", REAL)
def test_checkpoints_of_real_tools(tmp_path, tool):
    """Right ones are clean; a scale of the next row, a changed norm and a missing tensor are each named."""
    base, stem = write_llama(tmp_path / "base"), "model.layers.0.mlp.up_proj"
    REAL[tool](base, tmp_path / "q")
    right = check_quantised(tmp_path / "q", base)
    assert (right.exit_code, len(right.of("as stated")), causes(right)) == (0, 7, {})
    path = tmp_path / "q" / "model.safetensors"
    with safe_open(path, "pt") as file:
        about = file.metadata()
    for spoil, name, cause in (
        (spoil_scale, f"{stem}.weight", "scale of the row before"),
        (spoil_norm, "model.norm.weight", "not quantised, but 1 elements differ"),
        (drop_tensor, "model.embed_tokens.weight", "the base has it"),
    ):
        tensors = load_file(path)
        spoil(tensors, stem)
        bad = tmp_path / spoil.__name__
        shutil.copytree(tmp_path / "q", bad)
        save_file(tensors, bad / "model.safetensors", metadata=about)
        found = check_quantised(bad, base)
        assert list(causes(found)) == [name], causes(found)
        assert cause in causes(found)[name]


@pytest.mark.full
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("method", ["linear", "task_arithmetic", "ties", "dare_linear"])
def test_merges_of_real_tools(tmp_path, capsys, method):
    """mergekit's merge is as stated in every tensor; a tensor that was copied from a model is named."""
    pytest.importorskip("mergekit")
    from benchmarks.post_training import merge, write_models

    write_models(tmp_path)
    merge(tmp_path, tmp_path / "out", method)
    places = [str(tmp_path / name) for name in ("base", "a", "b", "c")][method == "linear" :]
    settings = tmp_path / "out" / "mergekit_config.yml"
    right = check_merged(tmp_path / "out", places, settings)
    count = len(right.of("as stated"))
    with capsys.disabled():
        print(f"\n{method}: {count} of {len(right.tensors)} tensors as stated")
    assert (right.exit_code, causes(right)) == (0, {})
    assert count == 30
    (path,) = (tmp_path / "out").glob("*.safetensors")
    tensors, name = load_file(path), "model.layers.0.mlp.up_proj.weight"
    tensors[name] = load_file(tmp_path / "a" / "model.safetensors")[name]
    save_file(tensors, path, metadata={"format": "pt"})
    assert list(causes(check_merged(tmp_path / "out", places, settings))) == [name]
