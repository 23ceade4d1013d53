"""Print the size and tag of a wheel, and its files that are not Python modules.

usage: describe_wheel.py WHEEL
"""

import sys
import zipfile
from pathlib import Path

REQUIRED = ("isobit/_native.so", "isobit/py.typed")


def describe(wheel: Path) -> list[str]:
    """Return the lines to print; raise SystemExit where something that must be inside is missing."""
    with zipfile.ZipFile(wheel) as archive:
        sizes = {entry.filename: entry.file_size for entry in archive.infolist()}
    contracts = [name for name in sizes if name.endswith("contract.yaml")]
    missing = [name for name in REQUIRED if name not in sizes]
    if missing or not contracts:
        raise SystemExit(f"{wheel.name} lacks {', '.join(missing) or 'contracts'}")
    modules = [name for name in sizes if name.endswith(".py")]
    return [
        f"{wheel.name}: {wheel.stat().st_size / 1e6:.1f} MB, unpacked {sum(sizes.values()) / 1e6:.1f} MB",
        f"kernels {sizes['isobit/_native.so'] / 1e6:.1f} MB, {len(modules)} modules, {len(contracts)} contracts",
    ]


if __name__ == "__main__":
    print("\n".join(describe(Path(sys.argv[1]))))
