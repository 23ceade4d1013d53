"""Check a merged checkpoint: repeat the merge that a configuration of mergekit states, within its arithmetic's error.

[Note: How close a merge must be]
The merge is computed in fp64 from the models' tensors. Per element, a tool that works in a dtype with unit roundoff u
may differ by (2k + 5)·u·Σ|terms| for k models in any order of addition, and by one rounding into the output's dtype.
Decisions are not repeated where rounding may turn them: a sum whose sign is within its error may be elected either
way, and magnitudes equal to TIES' threshold may be kept or dropped. DARE's masks are random; each element must be one
of the 2^k results that masks allow, with one factor per model, which is fitted and compared with the stated density,
and all together must have the mean over masks. In bf16 this says little about dare_ties of small tensors.
For models that hardly differ the bound per element is wide. So errors are also added up along the differences of the
models, where independent roundings average out (Hoeffding's inequality, eight standard deviations): wrong weights do
not, and are named by the weights that fit best.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

import torch
import yaml  # type: ignore[import-untyped]
from torch import Tensor

from isobit import bits
from isobit.comparing.checkpoints.compare import shapes_of
from isobit.comparing.checkpoints.names import Side, match_names
from isobit.comparing.checkpoints.readers import read_checkpoint
from isobit.comparing.derived.loading import Loader
from isobit.comparing.derived.records import STATED, WRONG, Derivation, Progress, TensorVerdict
from isobit.errors import ArgumentError
from isobit.foundation import files

LARGEST_CONFIG = 1 << 20
MOST_MODELS = 6  # 2^6 masks of DARE
DEVIATIONS = 8.0
PARALLEL = 0.9995  # the cosine from which SLERP is linear
FACTOR = 2.0**-5  # relative distance of DARE's factor from the one that density or norm asks for
# Method: whether it takes differences to the base, elects signs, drops, and normalises unless told otherwise.
METHODS = {
    "linear": (False, False, "", True),
    "slerp": (False, False, "", False),
    "task_arithmetic": (True, False, "", False),
    "ties": (True, True, "smallest", True),
    "dare_linear": (True, False, "random", False),
    "dare_ties": (True, True, "random", False),
}
KEYS = {
    "merge_method",
    "base_model",
    "dtype",
    "out_dtype",
    "models",
    "slices",
    "parameters",
    "tokenizer_source",
    "chat_template",
    "tokenizer",
}
PARAMETERS = {"weight", "density", "normalize", "int8_mask", "rescale", "lambda", "t"}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class MergeConfig:
    """What a merge is said to be, in mergekit's words.

    Attributes:
        method: linear, slerp, task_arithmetic, ties, dare_linear or dare_ties.
        models: names in their sequence, with their parameters.
        base: the base's name, "" without one.
        parameters: those of all models.
        dtype: the dtype that the tool works in; None for the models'.
        out_dtype: the dtype that is written; None for the one above.
    """

    method: str
    models: tuple[tuple[str, dict[str, Any]], ...]
    base: str = ""
    parameters: dict[str, Any] = field(default_factory=dict)
    dtype: torch.dtype | None = None
    out_dtype: torch.dtype | None = None

    def names(self) -> list[str]:
        """Return every model once, the base first."""
        return list(
            dict.fromkeys([*([self.base] if self.base else []), *(m for m, _ in self.models)])
        )

    def value(self, key: str, model: str, tensor: str, t: float, default: Any) -> Any:
        """Return a parameter for a tensor: that of the model, that of all, or the default."""
        own = next((p for name, p in self.models if name == model), {})
        for setting in (own.get(key), self.parameters.get(key)):
            found = evaluate(setting, tensor, t)
            if found is not None:
                return found
        return default


def refused(what: str, received: object, remedy: str) -> ArgumentError:
    """Return the error for a configuration that is not repeated here."""
    return ArgumentError(expected=what, received=str(received), remedy=remedy)


def evaluate(setting: Any, tensor: str, t: float) -> Any:
    """Return mergekit's value of a setting: a number, a gradient over layers, or the first filter that fits."""
    if setting is None or isinstance(setting, bool | int | float):
        return setting
    if isinstance(setting, str):
        return float(setting)
    if isinstance(setting, dict):
        setting = [setting]
    if all(isinstance(one, int | float) for one in setting) and setting:
        scaled = t * (len(setting) - 1)
        low = int(scaled)
        high = min(len(setting) - 1, low + 1)
        return (1 - (scaled - low)) * setting[low] + (scaled - low) * setting[high]
    for one in setting:
        if one.get("filter") in (None, "*") or str(one["filter"]) in tensor:
            return evaluate(one.get("value"), tensor, t)
    return None


def read_merge_config(path: Path) -> MergeConfig:
    """Read a configuration of mergekit.

    Raises:
        ArgumentError: If it is no configuration, or states something that is not repeated here.
    """
    try:
        found = yaml.safe_load(files.read_bytes(path, LARGEST_CONFIG))
    except (yaml.YAMLError, RecursionError) as error:
        said = str(error).splitlines()[0]
        raise refused("YAML", said, "name mergekit's configuration") from None
    if not isinstance(found, dict) or "merge_method" not in found:
        raise refused("mergekit's configuration", type(found).__name__, "it has a merge_method")
    method = str(found["merge_method"])
    if method not in METHODS:
        raise refused(
            f"one of {', '.join(METHODS)}",
            f"merge_method: {method}",
            "this method is not repeated; compare with a second run of the tool by `isobit compare checkpoints`",
        )
    found = without_modules(found)
    unknown = set(found) - KEYS
    if unknown:
        raise refused(
            f"keys {', '.join(sorted(KEYS))}", ", ".join(map(str, unknown)), "remove them"
        )
    if found.get("tokenizer_source") or found.get("tokenizer"):
        raise refused(
            "models with one vocabulary",
            "a tokenizer that is built for the merge",
            "merge without tokenizer_source, or leave embeddings out of what you check",
        )
    models = found.get("models") or whole_slice(found.get("slices"))
    listed = []
    if not isinstance(models, list) or not all(
        isinstance(m, dict) and "model" in m for m in models
    ):
        raise refused(
            "models as a list of {model: NAME}", str(models)[:200], "see mergekit's pages"
        )
    for one in models:
        own = one.get("parameters") or {}
        check_parameters(own)
        listed.append((str(one["model"]), dict(own)))
    shared = found.get("parameters") or {}
    check_parameters(shared)
    base = str(found.get("base_model") or "")
    if METHODS[method][0] and not base:
        raise refused("a base_model", "none", f"{method} merges differences to a base")
    if not any(name != base or not METHODS[method][0] for name, _ in listed):
        raise refused("a model to merge", "the base alone", "name the other models")
    return MergeConfig(
        method,
        tuple(listed),
        base,
        dict(shared),
        *(dtype_of(found.get(k)) for k in ("dtype", "out_dtype")),
    )


def without_modules(found: dict[str, Any]) -> dict[str, Any]:
    """Return a configuration with the models or slices of its only module, as mergekit's Python interface writes it."""
    if found.get("modules") is None:
        return found
    given = found["modules"]
    only = next(iter(given.values())) if isinstance(given, dict) and len(given) == 1 else None
    if (
        not isinstance(only, dict)
        or len(only) != 1
        or not set(only) <= {"models", "slices"} - set(found)
    ):
        raise refused(
            "models, slices, or one module that has one of them",
            "several modules, or a module with other keys",
            "such a merge is not repeated; check modules one by one",
        )
    return {key: value for key, value in found.items() if key != "modules"} | only


def whole_slice(slices: Any) -> list[dict[str, Any]]:
    """Return the models of a single slice of all layers; raise for anything else."""
    single = isinstance(slices, list) and len(slices) == 1 and isinstance(slices[0], dict)
    sources = slices[0].get("sources") if single else None
    if not (isinstance(sources, list) and all(isinstance(one, dict) for one in sources)):
        sources = None
    ranges = {tuple(one.get("layer_range", ())) for one in sources or ()}
    if not sources or len(ranges) != 1 or next(iter(ranges))[:1] != (0,):
        raise refused(
            "models, or one slice of the same layers from 0 on",
            "several slices, or other layers",
            "such a merge is not repeated; check slices one by one",
        )
    extra = slices[0].get("parameters") or {}
    return [{**one, "parameters": {**extra, **(one.get("parameters") or {})}} for one in sources]


def check_parameters(found: Any) -> None:
    """Raise for a parameter that is not repeated here."""
    unknown = set(found) - PARAMETERS if isinstance(found, dict) else {type(found).__name__}
    if unknown:
        raise refused(
            f"parameters {', '.join(sorted(PARAMETERS))}",
            ", ".join(map(str, unknown)),
            "a merge with it is not repeated here",
        )
    for key, value in found.items():
        if not is_setting(value):
            raise refused(
                f"{key} as a number, a list of numbers, or filters with a value each",
                str(value)[:200],
                "write finite numbers, as mergekit's pages do",
            )


def is_setting(value: Any, nested: bool = True) -> bool:
    """Return whether `evaluate` can read a value: numbers, a gradient, or a list of filters with such values."""
    if value is None:
        return True
    if isinstance(value, bool | int | float | str):
        try:
            return math.isfinite(float(value))
        except (ValueError, OverflowError):
            return False
    listed = value if isinstance(value, list) else [value]
    if all(isinstance(one, int | float) for one in listed):
        return bool(listed) and all(is_setting(one) for one in listed)
    filters = nested and all(isinstance(one, dict) and "value" in one for one in listed)
    return filters and all(is_setting(one["value"], False) for one in listed)


def dtype_of(name: Any) -> torch.dtype | None:
    """Return a dtype by its name in a configuration."""
    if name is None:
        return None
    if str(name) not in DTYPES:
        raise refused(f"a dtype of {', '.join(DTYPES)}", name, "name one of them")
    return DTYPES[str(name)]


def place_models(config: MergeConfig, sources: Sequence[str]) -> dict[str, Path]:
    """Return where each model of the configuration is: NAME=PATH, or a path that is or ends with its name."""
    named = dict(one.split("=", 1) for one in sources if "=" in one)
    paths = [one for one in sources if "=" not in one]
    found = {}
    for name in config.names():
        fitting = [named[name]] if name in named else [p for p in paths if p == name]
        fitting = fitting or [p for p in paths if Path(p).name == Path(name).name]
        if len(fitting) != 1:
            raise refused(
                f"one path for the model {name}",
                f"{len(fitting)} of {', '.join(sources)}",
                f"--merged-from {name}=PATH",
            )
        found[name] = Path(fitting[0])
    return found


def check_merged(
    path: Path | str,
    sources: Sequence[str],
    config: Path | str,
    *,
    progress: Progress | None = None,
) -> Derivation:
    """Repeat a merge tensor by tensor and compare.

    Args:
        path: The merged checkpoint.
        sources: Paths of the models, or NAME=PATH with the configuration's name.
        config: mergekit's configuration.
        progress: Called after each tensor with its number, the number of all, and its name.

    Returns:
        A verdict per tensor; see [Note: How close a merge must be].

    Raises:
        ArgumentError: If a checkpoint or the configuration cannot be read, or the method is not repeated here.
        OSError: If a file is not there or is not a regular file.
    """
    stated = read_merge_config(Path(config))
    if len(stated.models) > MOST_MODELS:
        raise refused(f"at most {MOST_MODELS} models", len(stated.models), "merge in two steps")
    merged = read_checkpoint(Path(path))
    loaders, sides = {}, {}
    missing: dict[str, str] = {}
    for name, place in place_models(stated, sources).items():
        checkpoint = read_checkpoint(place)
        matching = match_names(shapes_of(merged), shapes_of(checkpoint))
        loaders[name] = Loader(checkpoint)
        sides[name] = {pair.name: pair.right for pair in matching.pairs}
        for absent in matching.only_right:
            if absent not in merged.ties and absent not in checkpoint.ties:
                missing.setdefault(absent, name)
    layers = 1 + max((layer_of(name) for name in merged.tensors), default=0)
    verdicts = []
    for number, (name, stored) in enumerate(sorted(merged.tensors.items()), 1):
        found = gather(name, loaders, sides)
        if isinstance(found, str):
            verdicts.append(TensorVerdict(name, WRONG, 0, cause=found))
        else:
            layer = layer_of(name)
            t = 0.0 if layer < 0 else layer / (layers - 1) if layers > 1 else 1.0
            verdicts.append(judge(name, stored.load(), found, stated, t))
        if progress is not None:
            progress(number, len(merged.tensors), name)
    verdicts += [
        TensorVerdict(name, WRONG, 0, cause=f"{model} has it, the merge does not")
        for name, model in sorted(missing.items())
    ]
    said = f"{stated.method} of {', '.join(stated.names())}"
    return Derivation(str(path), said, tuple(verdicts), tuple(merged.notes))


def layer_of(name: str) -> int:
    """Return the number of the layer that a tensor is in, −1 for none."""
    found = re.search(r"\.(\d+)\.", name)
    return int(found.group(1)) if found else -1


def gather(
    name: str, loaders: dict[str, Loader], sides: dict[str, dict[str, Side]]
) -> dict[str, Tensor] | str:
    """Read a tensor of every model; or say which one lacks it."""
    found = {}
    for model, loader in loaders.items():
        side = sides[model].get(name)
        if side is None:
            return f"{model} has no such tensor"
        found[model] = loader.side(side)
    return found


@dataclass(frozen=True)
class Terms:
    """The tensors of a merge in fp64, flattened, and the parameters for this tensor.

    Attributes:
        base: of the base; zeros for methods without one.
        models: of each model that is merged: the tensor, or its difference to the base.
        weight: of each model.
        density: of each model.
        scale: what the sum is multiplied by: lambda.
        normalize: whether the sum is divided by the sum of the weights.
        method: its name.
        u: unit roundoff of the dtype that the tool works in.
    """

    base: Tensor
    models: list[Tensor]
    weight: list[float]
    density: list[float]
    scale: float
    normalize: bool
    method: str
    u: float

    def combine(self, kept: Sequence[Tensor | bool], sign: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the merge and the sum of its terms' magnitudes.

        Args:
            kept: Which elements of each model are in the sum.
            sign: Elected sign of each element; None without an election.
        """
        total, size = torch.zeros_like(self.base), torch.zeros_like(self.base)
        divisor = torch.zeros_like(self.base)
        for x, w, keep in zip(self.models, self.weight, kept, strict=True):
            term = torch.where(torch.as_tensor(keep), x * w, 0.0)
            if sign is not None:
                term = torch.where(term.sign() == sign, term, 0.0)
                divisor = divisor + torch.where(term != 0, w, 0.0)
            total, size = total + term, size + term.abs()
        if self.normalize:
            if sign is None:
                whole = sum(self.weight)
                divisor = torch.full_like(self.base, whole if abs(whole) >= 1e-8 else 1.0)
            divisor = torch.where(divisor == 0, 1.0, divisor)
            total, size = total / divisor, size / divisor.abs()
        return self.base + self.scale * total, abs(self.scale) * size

    def elected(self, kept: Sequence[Tensor | bool]) -> tuple[Tensor, Tensor]:
        """Return the elected signs, and where rounding may turn them."""
        terms = [
            torch.where(torch.as_tensor(keep), x * w, 0.0)
            for x, w, keep in zip(self.models, self.weight, kept, strict=True)
        ]
        total, size = sum(terms), sum(t.abs() for t in terms)
        assert isinstance(total, Tensor)
        assert isinstance(size, Tensor)
        unsure = (total.abs() <= (len(terms) + 2) * self.u * size) & (size > 0)
        return torch.where(total >= 0, 1.0, -1.0).double(), unsure


def terms_of(name: str, found: dict[str, Tensor], stated: MergeConfig, t: float) -> Terms:
    """Return the terms of a tensor's merge."""
    takes_base, _, _, normalize = METHODS[stated.method]
    first = next(iter(found.values()))
    dtype = stated.dtype or first.dtype
    names = [m for m, _ in stated.models if not (takes_base and m == stated.base)]
    base = found[stated.base].to(dtype) if takes_base else torch.zeros_like(first, dtype=dtype)

    def each(key: str, default: float) -> list[float]:
        return [float(stated.value(key, m, name, t, default)) for m in names]

    return Terms(
        base.double().flatten(),
        # The difference is one operation per element: in the tool's dtype it has one result.
        [
            ((found[m].to(dtype) - base) if takes_base else found[m].to(dtype)).double().flatten()
            for m in names
        ],
        each("weight", 1.0),
        each("density", 1.0),
        float(stated.value("lambda", "", name, t, 1.0)),
        bool(stated.value("normalize", "", name, t, normalize)),
        stated.method,
        float(torch.finfo(dtype).eps) / 2,
    )


def judge(
    name: str, now: Tensor, found: dict[str, Tensor], stated: MergeConfig, t: float
) -> TensorVerdict:
    """Judge one tensor of a merge."""
    n = now.numel()
    shapes = {model: list(tensor.shape) for model, tensor in found.items()}
    if any(shape != list(now.shape) for shape in shapes.values()):
        return TensorVerdict(
            name, WRONG, n, n, f"shape {list(now.shape)}, the models have {shapes}"
        )
    if not now.is_floating_point():
        same = all(bits.equal(now, tensor) for tensor in found.values())
        cause = "" if same else "whole numbers that differ from the models'"
        return TensorVerdict(name, STATED if same else WRONG, n, 0 if same else n, cause)
    wanted = stated.out_dtype or stated.dtype or next(iter(found.values())).dtype
    if now.dtype != wanted:
        return TensorVerdict(name, WRONG, n, n, f"{now.dtype}, {wanted} is stated")
    if not bool(torch.isfinite(now).all()):
        count = int((~torch.isfinite(now)).sum())
        return TensorVerdict(name, WRONG, n, count, "NaN or infinity")
    got = now.double().flatten()
    out = Output(got, float(torch.finfo(now.dtype).eps) / 2, float(torch.finfo(now.dtype).tiny))
    if stated.method == "slerp":
        wrong, cause, figures = judge_slerp(name, out, found, stated, t)
    else:
        terms = terms_of(name, found, stated, t)
        drops = METHODS[stated.method][2]
        judges = {"": judge_sum, "smallest": judge_ties, "random": judge_dare}
        wrong, cause, figures = judges[drops](out, terms)
    if cause:
        copies = [m for m, tensor in found.items() if bits.equal(now, tensor.to(now.dtype))]
        if copies and len(copies) < len(found):
            cause = f"a copy of {copies[0]}, not merged: {cause}"
    return TensorVerdict(name, WRONG if cause else STATED, n, wrong, cause, figures)


@dataclass(frozen=True)
class Output:
    """The merged tensor in fp64, flattened; unit roundoff and least normal number of its dtype."""

    got: Tensor
    u: float
    tiny: float

    def bound(self, exact: Tensor, size: Tensor, terms: Terms) -> Tensor:
        """Return how far an element may be from the exact merge; see [Note: How close a merge must be]."""
        k = len(terms.models)
        final = (self.u + terms.u) * exact.abs()
        return 1.01 * ((2 * k + 5) * terms.u * size + final) + self.tiny


Judged = tuple[int, str, dict[str, float | int | str]]


def counted(out: Output, exact: Tensor, bound: Tensor) -> Judged:
    """Return how many elements are beyond the bound, with the first of them."""
    apart = (out.got - exact).abs()
    bad = ~(apart <= bound)
    count = int(bad.sum())
    figures: dict[str, float | int | str] = {
        "largest error in bounds": float((apart / bound).max())
    }
    if not count:
        return 0, "", figures
    at = int(bad.nonzero()[0])
    said = f"element {at} is {float(out.got[at]):.9g}, the merge is {float(exact[at]):.9g} ± {float(bound[at]):.2g}"
    return count, f"{count:,} of {len(bad):,} elements are not the merge: {said}", figures


def judge_sum(out: Output, terms: Terms) -> Judged:
    """Judge a weighted sum: linear and task arithmetic."""
    every = [True] * len(terms.models)
    exact, size = terms.combine(every, None)
    bound = out.bound(exact, size, terms)
    wrong, cause, figures = counted(out, exact, bound)
    along = along_models(out, terms, exact, bound)
    if cause or along:
        return wrong or len(exact), fitted(out, terms) + (cause or along), figures
    return 0, "", figures


def along_models(out: Output, terms: Terms, exact: Tensor, bound: Tensor) -> str:
    """Add up the errors along each model's difference to the merge; say if they do not average out."""
    error = out.got - exact
    change = exact - terms.base
    whole = sum(terms.weight) if terms.normalize else 1.0
    for number, x in enumerate(terms.models, 1):
        direction = x - change if not float(terms.base.abs().sum()) else x
        noise = DEVIATIONS * float((bound * direction).norm())
        # Weights, their sum and lambda are rounded once each: errors that do not average out.
        systematic = (
            3
            * terms.u
            * sum(
                abs(w * terms.scale / (whole or 1.0)) * abs(float((y * direction).sum()))
                for w, y in zip(terms.weight, terms.models, strict=True)
            )
        )
        systematic += 2 * terms.u * abs(float((terms.base * direction).sum()))
        if abs(float((error * direction).sum())) > noise + systematic:
            return f"errors do not average out along model {number}"
    return ""


def fitted(out: Output, terms: Terms) -> str:
    """Return the weights that explain the result best, in words, if they explain it."""
    columns = torch.stack(terms.models, 1)
    try:
        found = torch.linalg.lstsq(columns, (out.got - terms.base).unsqueeze(1), driver="gelsd")
    except RuntimeError:
        return ""
    weights = found.solution.flatten()
    exact = terms.base + columns @ weights
    size = (columns * weights).abs().sum(1)
    explained = ((out.got - exact).abs() <= out.bound(exact, size, terms) * 1.5).double().mean()
    if float(explained) < 0.99:
        return ""
    whole = sum(terms.weight) if terms.normalize else 1.0
    stated = [terms.scale * w / (whole or 1.0) for w in terms.weight]
    if max(abs(float(a) - b) for a, b in zip(weights, stated, strict=True)) < 1e-3:
        return ""
    said = ", ".join(f"{float(w):.4g}" for w in weights)
    return f"weights {said} explain it, {', '.join(f'{w:.4g}' for w in stated)} are stated; "


def judge_ties(out: Output, terms: Terms) -> Judged:
    """Judge TIES: trim, elect, and average those that agree."""
    kept, unsure = [], []
    for x, density in zip(terms.models, terms.density, strict=True):
        size = x.abs()
        count = min(len(x), max(1, int(density * len(x)))) if density > 0 else 0
        if count == len(x) or density >= 1:
            kept.append(torch.ones_like(x, dtype=torch.bool))
            unsure.append(torch.zeros_like(x, dtype=torch.bool))
            continue
        least = size.topk(count).values[-1] if count else torch.tensor(torch.inf).double()
        at_least = size >= least
        kept.append(at_least)
        tied = size == least
        unsure.append(tied if int(at_least.sum()) > count else torch.zeros_like(tied))
    sign, turned = terms.elected(kept)
    exact, size = terms.combine(kept, sign)
    bound = out.bound(exact, size, terms)
    open_ = torch.stack(unsure).any(0) | turned | ((out.got - exact).abs() > bound)
    where = open_.nonzero().flatten()
    if len(where):
        some = chosen(terms, where)
        masks = [k[where] for k in kept]
        options = product(*[(False, True)] * len(kept))
        for flip in options:
            tried = [
                torch.where(torch.as_tensor(f) & u[where], ~m, m)
                for f, u, m in zip(flip, unsure, masks, strict=True)
            ]
            elected, may_turn = some.elected(tried)
            for turn in (1.0, -1.0):
                sign_here = torch.where(may_turn, turn * elected, elected)
                value, its_size = some.combine(tried, sign_here)
                its_bound = out.bound(value, its_size, terms)
                better = (out.got[where] - value).abs() / its_bound < (
                    out.got[where] - exact[where]
                ).abs() / bound[where]
                exact[where] = torch.where(better, value, exact[where])
                bound[where] = torch.where(better, its_bound, bound[where])
    wrong, cause, figures = counted(out, exact, bound)
    figures["decided by rounding"] = int((torch.stack(unsure).any(0) | turned).sum())
    if cause:
        cause = known_mistake(out, terms, kept, sign) + cause
    return wrong, cause, figures


def chosen(terms: Terms, where: Tensor) -> Terms:
    """Return the terms of some elements."""
    return Terms(
        terms.base[where],
        [x[where] for x in terms.models],
        terms.weight,
        terms.density,
        terms.scale,
        terms.normalize,
        terms.method,
        terms.u,
    )


def known_mistake(out: Output, terms: Terms, kept: list[Tensor], sign: Tensor) -> str:
    """Return which known mistake explains the result, in words."""
    every = [torch.ones_like(k) for k in kept]
    other = Terms(**{**vars(terms), "normalize": not terms.normalize})
    unity = Terms(**{**vars(terms), "scale": 1.0})
    without, _ = terms.elected(every)
    tried = {
        "no signs were elected": terms.combine(kept, None),
        "nothing was trimmed": terms.combine(every, without),
        "signs were elected the other way": terms.combine(kept, -sign),
        "the sum was not normalised"
        if terms.normalize
        else "the sum was normalised": other.combine(kept, sign),
        "lambda was left out": unity.combine(kept, sign),
    }
    for words, (value, size) in tried.items():
        near = (out.got - value).abs() <= out.bound(value, size, terms)
        if float(near.double().mean()) > 0.995:
            return f"{words}: "
    return ""


def judge_dare(out: Output, terms: Terms) -> Judged:
    """Judge DARE: each element is one of the results that masks allow, with a factor per model."""
    options = list(product(*[(False, True) if d < 1 else (True,) for d in terms.density]))
    factors = [1 / d if 0 < d < 1 else 1.0 for d in terms.density]
    for _ in range(4):
        exact, bound, masks = nearest_mask(out, terms, factors, options)
        factors = [refit(out, terms, masks, i, f) for i, f in enumerate(factors)]
    exact, bound, masks = nearest_mask(out, terms, factors, options)
    wrong, cause, figures = counted(out, exact, bound)
    clear = told_apart(out, terms, factors, options)
    count = int(clear.sum())
    for i, (density, factor) in enumerate(zip(terms.density, factors, strict=True)):
        if density >= 1 or not float(terms.models[i].abs().sum()):
            continue
        share = float(masks[i][: len(clear)][clear].double().mean()) if count else density
        limit = DEVIATIONS * (density * (1 - density) / max(count, 1)) ** 0.5
        figures[f"factor of model {i + 1}"] = factor
        figures[f"kept of model {i + 1}"] = share
        if not cause and abs(share - density) > limit:
            wrong = len(out.got)
            cause = f"{share:.4f} of model {i + 1} are kept, density {density} is stated"
        # By density, or by the norm of what was kept, which varies; fitted from the elements that show it.
        off = abs(factor * density - 1)
        if not cause and count and off > FACTOR + norm_spread(terms, i) + DEVIATIONS / count**0.5:
            wrong = len(out.got)
            cause = f"model {i + 1} is multiplied by {factor:.4f}, density {density} asks for {1 / density:.4f}"
    if not cause:
        cause = away_from_mean(out, terms, bound, options)
        wrong = len(out.got) if cause else 0
    return wrong, cause, figures


def norm_spread(terms: Terms, i: int) -> float:
    """Return eight relative standard deviations of the norm of what a random mask keeps of a model."""
    size, density = terms.models[i].abs(), terms.density[i]
    relative = float(size.norm()) / max(float(size.sum()), 1e-300)
    return DEVIATIONS * relative * math.sqrt((1 - density) / density)


def away_from_mean(
    out: Output, terms: Terms, bound: Tensor, options: list[tuple[bool, ...]]
) -> str:
    """Add up the distances from the mean over all masks along each model; say if they do not average out."""
    scaled = with_factors(terms, [1 / d if 0 < d < 1 else 1.0 for d in terms.density])
    mean, square = torch.zeros_like(out.got), torch.zeros_like(out.got)
    for mask in options:
        chance = 1.0
        for keep, density in zip(mask, terms.density, strict=True):
            chance *= min(density, 1.0) if keep else 1 - density
        step = merged_by(scaled, mask)[0] - terms.base
        mean, square = mean + chance * step, square + chance * step.square()
    error = out.got - terms.base - mean
    noise = bound.square() + (square - mean.square()).clamp(min=0)
    for number, x in enumerate(terms.models, 1):
        # Roundings of weights and factors, and the spread of factors, do not average out.
        fixed = 2 * terms.u * abs(float((terms.base * x).sum()))
        fixed += sum(
            (3 * terms.u + (norm_spread(terms, i) if d < 1 else 0.0))
            * abs(w * terms.scale)
            * float((y * x).abs().sum() if METHODS[terms.method][1] else (y * x).sum().abs())
            for i, (w, y, d) in enumerate(
                zip(terms.weight, terms.models, terms.density, strict=True)
            )
        )
        if abs(float((error * x).sum())) > DEVIATIONS * float((noise.sqrt() * x).norm()) + fixed:
            return f"not the mean over masks: the change along model {number} is another"
    return ""


def with_factors(terms: Terms, factors: list[float]) -> Terms:
    """Return the terms with each model multiplied."""
    models = [f * x for f, x in zip(factors, terms.models, strict=True)]
    return Terms(**{**vars(terms), "models": models})


def merged_by(terms: Terms, mask: Sequence[bool]) -> tuple[Tensor, Tensor]:
    """Return the merge of the models that a mask keeps, and its terms' magnitudes."""
    elects = METHODS[terms.method][1]
    return terms.combine(mask, terms.elected(mask)[0] if elects else None)


def nearest_mask(
    out: Output, terms: Terms, factors: list[float], options: list[tuple[bool, ...]]
) -> tuple[Tensor, Tensor, Tensor]:
    """Return, of the results that masks allow, the one nearest to each element: value, bound, and mask per model."""
    scaled = with_factors(terms, factors)
    best = torch.full_like(out.got, torch.inf)
    exact = bound = terms.base
    masks = torch.zeros(len(terms.models), len(out.got), dtype=torch.bool)
    for mask in options:
        value, size = merged_by(scaled, mask)
        limit = out.bound(value, size, terms)
        ratio = (out.got - value).abs() / limit
        better = ratio < best
        best = torch.where(better, ratio, best)
        exact = torch.where(better, value, exact)
        bound = torch.where(better, limit, bound)
        masks = torch.where(better, torch.tensor(mask).unsqueeze(1), masks)
    return exact, bound, masks


def told_apart(
    out: Output, terms: Terms, factors: list[float], options: list[tuple[bool, ...]]
) -> Tensor:
    """Return the elements whose mask can be read from them: all results that masks allow are apart."""
    some = chosen(with_factors(terms, factors), torch.arange(min(len(out.got), 1 << 18)))
    each = [merged_by(some, mask) for mask in options]
    bound = torch.stack([out.bound(v, s, terms) for v, s in each]).amax(0)
    values = torch.stack([v for v, _ in each]).sort(0).values
    return ((values[1:] - values[:-1]) > 2 * bound).all(0)


def refit(out: Output, terms: Terms, masks: Tensor, i: int, factor: float) -> float:
    """Return the factor of a model by the median of the elements that it alone changed."""
    alone = masks[i] & (masks.sum(0) == 1)
    if terms.density[i] >= 1 or not bool(alone.any()):
        return factor
    some = chosen(terms, alone.nonzero().flatten())
    step = merged_by(some, [j == i for j in range(len(terms.models))])[0] - some.base
    # Weighted by the step: where it is small, the quotient is mostly rounding.
    ratio = (out.got[alone] - some.base) / torch.where(step == 0, torch.inf, step)
    order = ratio.argsort()
    weight = step.abs()[order].cumsum(0)
    if not float(weight[-1]):
        return factor
    return float(ratio[order][int(torch.searchsorted(weight, weight[-1] / 2))])


def judge_slerp(
    name: str, out: Output, found: dict[str, Tensor], stated: MergeConfig, t: float
) -> Judged:
    """Judge spherical interpolation from the base to the other model."""
    others = [m for m in stated.names() if m != stated.base]
    if len(others) != 1 or not stated.base:
        raise refused(
            "a base_model and one other", ", ".join(stated.names()), "SLERP takes two models"
        )
    share = float(stated.value("t", others[0], name, t, 0.5))
    a, b = (found[m].double().flatten() for m in (stated.base, others[0]))
    u = 2.0**-24
    exact, size, cosine = slerp(a, b, share)
    # The cosine is a sum in fp32: its error moves the angle, and with it both coefficients.
    moved = [slerp(a, b, share, by)[0] for by in (-(2.0**-19), 2.0**-19)]
    moved = moved if abs(abs(cosine) - PARALLEL) > 2.0**-18 else [lerp(a, b, share), *moved]
    spread = torch.stack([(m - exact).abs() for m in moved]).amax(0)
    bound = 1.01 * (8 * u * size + out.u * exact.abs() + spread) + out.tiny
    wrong, cause, figures = counted(out, exact, bound)
    figures["cosine"] = cosine
    tried = {
        "linear instead of spherical": lerp(a, b, share),
        "interpolated from the other end": slerp(b, a, share)[0],
    }
    for words, value in tried.items():
        near = (out.got - value).abs() <= bound
        if cause and float(near.double().mean()) > 0.995:
            return wrong, f"{words}: {cause}", figures
    return wrong, cause, figures


def lerp(a: Tensor, b: Tensor, t: float) -> Tensor:
    """Return the linear interpolation."""
    return (1 - t) * a + t * b


def slerp(a: Tensor, b: Tensor, t: float, by: float = 0.0) -> tuple[Tensor, Tensor, float]:
    """Return the spherical interpolation of two tensors, its terms' magnitudes, and the cosine; `by` is added to it."""
    norms = [float(x.norm()) or 1.0 for x in (a, b)]
    cosine = float((a / norms[0] * (b / norms[1])).sum())
    moved = max(-1.0, min(1.0, cosine + by))
    if abs(cosine) > PARALLEL:
        return lerp(a, b, t), (1 - t) * a.abs() + t * b.abs(), cosine
    angle = torch.acos(torch.tensor(moved).double())
    first = float(torch.sin((1 - t) * angle) / torch.sin(angle))
    second = float(torch.sin(t * angle) / torch.sin(angle))
    return first * a + second * b, abs(first) * a.abs() + abs(second) * b.abs(), cosine
