"""Which types of causal language models of the installed transformers have only known parts, and what others lack.

Models are made on the meta device, with few layers: no weights are loaded or drawn.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from isobit.errors import ArgumentError, IsobitError
from isobit.integrations.transformers.enabling import OUTER
from isobit.integrations.transformers.package import library
from isobit.integrations.transformers.parts.part import plain_type
from isobit.integrations.transformers.parts.recognition import Plan, make_plan

LAYERS = 2
# What configs call the number of layers.
COUNTS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers")


@dataclass(frozen=True)
class Row:
    """Modules of one class that are one part."""

    part: str
    kind: str  # the class
    found: str  # where it was recognised
    count: int
    example: str  # the name of one of them


@dataclass(frozen=True)
class Survey:
    """What was recognised of one type of model."""

    type: str
    model: str  # the class
    known: bool
    missing: str  # the first thing that is not known
    rows: tuple[Row, ...] = ()


def list_types() -> list[str]:
    """Return the types of causal language models of the installed transformers."""
    return sorted(library("models.auto.modeling_auto").MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def survey(types: Iterable[str]) -> Iterator[Survey]:
    """Yield what is known of each type.

    Raises:
        ArgumentError: If transformers has no such type.
    """
    known = list_types()
    for one in types:
        if one not in known:
            near = [other for other in known if one.lower()[:4] in other][:6]
            raise ArgumentError(
                expected="a type of causal language models of transformers, as its config.json has it (model_type)",
                received=repr(one),
                remedy=f"one of {', '.join(near)}" if near else "isobit families lists the types",
            )
        yield survey_type(one)


def survey_type(one: str) -> Survey:
    """Return what is known of one type."""
    name = library("models.auto.modeling_auto").MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[one]
    name = name if isinstance(name, str) else name[0]
    try:
        with quietly():
            model = build(one, name)
    except Exception as error:  # configurations may raise anything
        said = f"{type(error).__name__}: {error}".splitlines()[0]
        return Survey(one, name, False, f"no model could be made of its default config: {said}")
    try:
        plan = make_plan(model, OUTER)
    except IsobitError as error:
        return Survey(one, name, False, error.received)
    return Survey(one, name, True, "", tuple(rows_of(plan)))


def build(one: str, name: str) -> Any:
    """Make a model of few layers on the meta device."""
    make = library("models.auto.configuration_auto").CONFIG_MAPPING[one]
    config = make()
    counts = [key for key in COUNTS if isinstance(getattr(config, key, None), int)]
    few = {key: min(getattr(config, key), LAYERS) for key in counts}
    heads = getattr(config, "num_attention_heads", None)
    if heads and getattr(config, "head_dim", 1) is None:
        few["head_dim"] = config.hidden_size // heads
    try:
        config = make(**few)
    except Exception:  # a config whose options depend on the number of layers
        config = make()
    # Drawing weights on the meta device is most of the time that a model takes to make.
    with torch.device("meta"), library("initialization").no_init_weights():
        return getattr(library(), name)(config)


@contextmanager
def quietly() -> Iterator[None]:
    """Make models without warnings of their default configs."""
    logging = library("utils.logging")
    level = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(level)


def rows_of(plan: Plan) -> list[Row]:
    """Return the parts of a model by class, in the order of the first of each."""
    found: dict[tuple[str, str, str], list[str]] = {}
    for module, part in plan.parts.items():
        if part.name == "container" or module in plan.inside:
            continue
        key = part.name, name_of(module), part.found
        found.setdefault(key, []).append(plan.names[module] or "the model")
    return [Row(*key, len(names), names[0]) for key, names in found.items()]


def name_of(module: nn.Module) -> str:
    """Return the name of a module's class."""
    return plain_type(module).__name__
