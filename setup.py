"""Builds the native kernels; where that fails, the package installs without them and says why."""

import shutil
from pathlib import Path

from setuptools import setup
from torch.utils.cpp_extension import BuildExtension, CppExtension, get_cxx_compiler

ROOT = Path(__file__).parent
REASON = "native_build_failure.txt"

# Pinned: nothing of the build machine (-march=native) and nothing that reorders or fuses additions.
FLAGS = ["-O3", "-g0", "-std=c++20", "-fopenmp", "-ffp-contract=off", "-fno-fast-math", "-Wall"]


class Build(BuildExtension):
    """Builds, or writes down why not: the portable executor serves then, and `isobit doctor` reads the reason."""

    def run(self) -> None:
        # What is installed is the source folder (editable), or the folder that becomes the wheel.
        package = (ROOT / "src" if self.inplace else Path(self.build_lib)) / "isobit"
        for folder in (ROOT / "src" / "isobit", package):
            (folder / REASON).unlink(missing_ok=True)
        try:
            compiler = get_cxx_compiler()
            if shutil.which(compiler) is None:
                raise RuntimeError(f"no C++ compiler, as `{compiler}` is not found")
            super().run()
        except Exception as error:
            package.mkdir(parents=True, exist_ok=True)
            (package / REASON).write_text(
                f"{error}; for the compiler's words: pip install -v . --no-build-isolation"
            )
            print(
                f"isobit: native kernels were not built ({error}); the portable executor will serve"
            )


setup(
    ext_modules=[
        CppExtension(
            "isobit._native",
            [str(p.relative_to(ROOT)) for p in sorted((ROOT / "csrc").glob("*.cpp"))],
            depends=[str(p.relative_to(ROOT)) for p in sorted((ROOT / "csrc").glob("*.h"))],
            extra_compile_args=[*FLAGS, f'-DISOBIT_FLAGS="{" ".join(FLAGS)}"'],
            extra_link_args=["-fopenmp"],
        )
    ],
    cmdclass={"build_ext": Build},
)
