"""isobit's contracts as a backend is held to them, with digests of their own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from isobit.contracts.language.contract import Contract
from isobit.contracts.store.sources import ROOT, hash_text
from isobit.contracts.store.tree import Tree, entry_from, facts_of, library
from isobit.contracts.workspace import Workspace
from isobit.library.on_gpu.derive import Derived, derive

# What runs the kernels and the twins. Plans are not among them: what they make of a contract is in its digest.
BACKENDS = "isobit.certifying.running.backends:executing"
OWN = ("isobit.library.on_gpu.claims:linear_samples", "isobit.library.on_gpu.twins:twin")


class BackendTree(Tree):
    """Contracts derived for a backend. Only isobit's own are known: a backend serves isobit's operators alone."""

    def __init__(
        self, folders: Sequence[Path], home: Path, backend: str, target: str, cached: bool = True
    ) -> None:
        """Derive the contracts below some folders; `backend` and `target` are those of `executing`."""
        super().__init__(folders, home, cached)
        self.derived: dict[str, Derived] = {}
        self._kept: dict[str, Contract] = {}
        operators = sorted(p for p in ROOT.glob("ops/*/triton.py"))
        modules = [f"isobit.ops.{path.parent.name}.triton:run" for path in operators]
        sources = hash_text(*map(self._sources.digest_of, [*modules, BACKENDS, *OWN]))
        self.variant = f" by {backend} {target} {sources[:32]}"
        for name, entry in list(self.entries.items()):
            if library() not in Path(entry.path).resolve().parents:
                del self.entries[name]
                continue
            found = self.derived[name] = derive(super().load(name))
            if found.contract is None:
                del self.entries[name]
                continue
            self._kept[name] = found.contract
            facts = facts_of(found.contract)
            self.entries[name] = entry_from(entry.path, entry.text_digest, facts)
        self.chosen = [name for name in self.chosen if name in self.entries]

    def load(self, id: str) -> Contract:
        """Return a derived contract."""
        return self._kept[id]

    def digest(self, id: str, variant: str = "", on: str = "") -> str:
        """Return the digest of a derived contract, which no contract of the CPU has; its path does not count."""
        kept = self._kept.get(id)
        derived = hash_text(repr(replace(kept, path="")))[:32] if kept else ""
        return super().digest(id, f"{variant}{self.variant} {derived}", on)


class BackendWorkspace(Workspace):
    """Contracts derived for a backend, with their evidence."""

    def __init__(self, folders: Sequence[Path], home: Path, backend: str, target: str) -> None:
        """Open the contracts; `backend` and `target` are those of `executing`."""
        self.backend = (backend, target)
        super().__init__(folders, home)

    def open_tree(self, cached: bool = True) -> BackendTree:
        """Derive the contracts."""
        self.derived = BackendTree(self.folders, self.home, *self.backend, cached)
        return self.derived
