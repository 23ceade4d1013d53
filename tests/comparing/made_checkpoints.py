"""One state dict, written in every layout that `isobit compare checkpoints` reads."""

import json

import torch
from safetensors.torch import save_file


def state(seed=0):
    """Weights of a small decoder layer, in three dtypes."""
    make = torch.Generator().manual_seed(seed)
    rows = {"q_proj": 8, "k_proj": 4, "v_proj": 4}
    found = {f"layers.0.{n}.weight": torch.randn(r, 6, generator=make) for n, r in rows.items()}
    found |= {
        f"layers.0.{n}.weight": torch.randn(10, 6, generator=make).bfloat16()
        for n in ("gate_proj", "up_proj")
    }
    found["layers.0.down_proj.weight"] = torch.randn(6, 10, generator=make).bfloat16()
    found["norm.weight"] = torch.randn(6, generator=make).half()
    found["steps"] = torch.tensor(7)
    return found


def write_index(folder, tensors, parts=2):
    """Write the sharded layout of transformers."""
    folder.mkdir()
    names = sorted(tensors)
    where = {}
    for k in range(parts):
        file = f"model-{k + 1:05}-of-{parts:05}.safetensors"
        mine = {n: tensors[n] for n in names[k::parts]}
        save_file(mine, folder / file)
        where |= dict.fromkeys(mine, file)
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": where}))
    return folder


def write_ranks(folder, tensors, ranks=2, save=torch.save, ending="pt"):
    """Write a folder per rank: q, k, v, gate and up by rows, down by columns, the rest on every rank."""
    for rank in range(ranks):
        (folder / f"rank_{rank}").mkdir(parents=True)
        mine = {}
        for name, tensor in tensors.items():
            if tensor.dim() == 2:
                dim = 1 if "down_proj" in name else 0
                tensor = tensor.chunk(ranks, dim)[rank].contiguous()
            mine[name] = tensor
        save(mine, folder / f"rank_{rank}" / f"model.{ending}")
    return folder


def fuse(tensors, order=("q_proj", "k_proj", "v_proj")):
    """Return the same weights with fused projections."""
    found = dict(tensors)
    for fused, parts in (("qkv_proj", order), ("gate_up_proj", ("gate_proj", "up_proj"))):
        pieces = [found.pop(f"layers.0.{part}.weight") for part in parts]
        found[f"layers.0.{fused}.weight"] = torch.cat(pieces)
    return found


def flip_one_bit(tensors, name="layers.0.k_proj.weight", element=5):
    """Return a copy in which one bit of one element differs."""
    found = dict(tensors)
    changed = found[name].clone()
    bits = changed.view(torch.int32 if changed.element_size() == 4 else torch.int16)
    bits.view(-1)[element] ^= 1
    found[name] = changed
    return found
