"""The tables of digests are those of the installed transformers' sources, and no other file names a family."""

import re
from importlib import import_module
from pathlib import Path

import pytest

import isobit
from isobit.integrations.transformers.parts import digests
from isobit.integrations.transformers.parts.source import digest_of_class, digest_of_function

TABLES = [
    "NORMS",
    "GATED_NORMS",
    "DELTA_NETS",
    "ROTARY_EMBEDDINGS",
    "ROTATIONS",
    "EMBEDDINGS",
    "GATED_MLPS",
    "ELEMENTWISE",
    "ROUTERS",
    "EXPERTS",
    "MIXTURES",
    "LATENT_ATTENTIONS",
    "TEMPERED_ATTENTIONS",
    "COMPOSITES",
    "HEADS",
    "SCORING_HEADS",
    "ENCODER_HEADS",
]
FILES = ("activations", "modeling_layers")  # of transformers, which belong to no family
ENTRIES = [
    (table, digest, entry if isinstance(entry, str) else entry[0])
    for table in TABLES
    for digest, entry in getattr(digests, table).items()
]


@pytest.mark.parametrize(("table", "digest", "path"), ENTRIES, ids=[e[2] for e in ENTRIES])
def test_a_digest_is_that_of_its_source(table, digest, path):
    home, _, name = path.partition(".")
    module = home if home in FILES else f"models.{home}.modeling_{home}"
    found = getattr(import_module(f"transformers.{module}"), name)
    assert digest == (
        digest_of_class(found) if isinstance(found, type) else digest_of_function(found)
    )


def test_no_source_but_the_table_names_a_family():
    """A class of a family, as the table of digests has them, in the code of the integration (not in docstrings)."""
    names = {path.partition(".")[2] for _, _, path in ENTRIES if not path.startswith(FILES)}
    names -= {"apply_rotary_pos_emb"}
    home = Path(isobit.__file__).parent / "integrations" / "transformers"
    files = [path for path in home.rglob("*.py") if path.name != "digests.py"]
    assert len(files) > 30
    for path in files:
        code = re.sub(r'"""(?s:.*?)"""', "", path.read_text())
        assert not [name for name in names if re.search(rf"\b{name}\b", code)], path
