"""The program of one run: run a script as `python script.py` would, and record what it computes.

Its only argument is a JSON object. The folder of this file is taken off the search path before anything is imported.
"""

from __future__ import annotations

import json
import os
import sys
import time


def main() -> int:
    """Run the script that the arguments name. The exit code is the script's own, or 0 after the last step."""
    here = os.path.dirname(os.path.abspath(__file__))
    has_folder = bool(sys.path) and os.path.abspath(sys.path[0]) == here
    if has_folder:
        del sys.path[0]
    orders = json.loads(sys.argv[1])
    script = orders["script"]
    from isobit.comparing.runs.evidence import FilesRead
    from isobit.comparing.runs.fixes import apply
    from isobit.comparing.runs.observer import Observer, StepsDone
    from isobit.comparing.runs.places import Places

    files = FilesRead(orders["began"], time.time())
    sys.argv[:] = [script, *orders["arguments"]]
    if has_folder:
        sys.path.insert(0, os.path.dirname(os.path.realpath(script)))
    for fix in orders["fixes"]:
        apply(fix)
    with open(orders["record"], "w", encoding="utf-8") as record:

        def tell(step: int) -> None:
            with open(orders["progress"], "w", encoding="utf-8") as progress:
                progress.write(str(step))

        observer = Observer(record, Places(os.path.dirname(script)), orders["steps"], tell)
        sys.addaudithook(files.watch)
        observer.install()
        try:
            with observer:
                run_script(script)
        except StepsDone:
            pass
        finally:
            if observer.is_own_process():
                observer.quiet = True
                observer.write("files", paths=files.paths)
                observer.finish()
    return 0


def run_script(path: str) -> None:
    """Run a file as the main module."""
    import runpy

    runpy.run_path(path, run_name="__main__")


if __name__ == "__main__":
    sys.exit(main())
