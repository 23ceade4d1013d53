"""Which share of training recipes is wholly served: recomputed from counts of 1,486 recipes of 11 frameworks.

The counts are of July and August 2026, by regular expressions over the folders of recipes. A recipe is wholly served if
all its families and its adapter are supported, which needs joint counts (family × adapter × framework). Only what each
step adds to those before it was kept of these, so that this can add the steps in their order, and in no other.
"""

# Recipes that name a model, and those of them with LoRA, by framework.
RECIPES = {
    "verl": (119, 10),
    "TRL": (115, 50),
    "OpenRLHF": (16, 1),
    "NeMo-RL": (282, 9),
    "SkyRL": (158, 21),
    "prime-rl": (114, 60),
    "axolotl": (203, 149),
    "slime": (89, 7),
    "open-instruct": (211, 3),
    "LLaMA-Factory": (85, 40),
    "tinker-cookbook": (94, 42),
}
# Points of the share, frameworks equal, that each step adds to those before it, and whether it is supported.
STEPS = (
    ("Llama, Qwen2, Qwen3 dense", 39.9, True),
    ("Qwen3-Next and 3.5 (delta rule)", 9.8, True),
    ("LoRA", 13.4, True),
    ("mixtures with a softmax router", 6.4, True),
    ("MLA and sigmoid routers", 5.8, True),
    ("other dense families", 3.9, True),
    ("QLoRA", 3.9, False),
    ("Mamba-2", 4.3, False),
    ("Qwen VL", 4.1, False),
    ("others", 3.9, False),
    ("Gemma 1 to 3", 2.1, False),
    ("gpt-oss", 1.3, False),
    ("Gemma 4", 1.2, False),
)


def served():
    """The share of recipes that are wholly served, in percent: of the steps up to the first that is not supported."""
    total = 0.0
    for _, points, is_supported in STEPS:
        if not is_supported:
            break
        total += points
    return round(total, 1)


def lora_share():
    """The mean over frameworks of the share of recipes with LoRA, in percent."""
    return round(
        100 * sum(with_lora / all_ for all_, with_lora in RECIPES.values()) / len(RECIPES), 1
    )


def run(quick, threads, dtypes):
    """Print the shares; return 1 if the steps do not add up to all recipes."""
    at = 0.0
    for name, points, is_supported in STEPS:
        at = round(at + points, 1)
        print(
            f"{at:5.1f} %  + {points:4.1f}  {'supported' if is_supported else 'not wholly'}  {name}"
        )
    recipes = sum(all_ for all_, _ in RECIPES.values())
    print(
        f"{served()} % of {recipes:,} recipes of {len(RECIPES)} frameworks (equal weights) are wholly served"
    )
    print(
        f"{lora_share()} % have LoRA; a family's share without its joint count with LoRA bounds no step by itself"
    )
    return int(at != 100.0 or recipes != 1486)
