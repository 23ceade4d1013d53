"""The tutorial works as written: its files are created, its commands run, and their exit codes match."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "tutorial" / "contract-for-your-kernel.md").read_text()
pytest.importorskip("triton")


@pytest.mark.full  # two minutes and a half: seven commands, each judging a contract in Triton's interpreter
def test_the_tutorial_works(tmp_path):
    files = dict(re.findall(r'```(?:python|yaml) title="(\S+)"\n(.*?)```', PAGE, re.DOTALL))
    assert set(files) == {"my_kernels.py", "rms-norm-v1.contract.yaml"}
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    commands = [
        line
        for block in re.findall(r"```bash\n(.*?)```", PAGE, re.DOTALL)
        for line in block.splitlines()
        if "isobit" in line and not line.startswith("pip")
    ]
    assert len(commands) == 7
    bin_folder = str(Path(sys.executable).parent)
    environment = os.environ | {"PATH": f"{bin_folder}:{os.environ['PATH']}"}
    seen = []
    for command in commands:
        if "isobit contract new" in command:
            command += " --force"
        if seen and "exit 1" in seen[-1]:  # section 4
            text = (tmp_path / "my_kernels.py").read_text()
            fixed = re.sub(r"block = 64 if .*", "block = 256", text)
            assert fixed != text
            (tmp_path / "my_kernels.py").write_text(fixed)
        words = command.partition("  #")[0]
        done = subprocess.run(
            words, shell=True, cwd=tmp_path, env=environment, capture_output=True, text=True
        )
        wanted = re.search(r"# exit (\d)", command)
        assert done.returncode == int(wanted[1] if wanted else 0), (
            f"{command}\n{done.stdout}\n{done.stderr}"
        )
        if "# kept" in command:
            assert "kept" in done.stdout, f"{command}\n{done.stdout}"
            assert "not-judged" not in done.stdout
        if "exit 1" in command:
            # A quiet machine shrinks it to 65; a busy one stops where its time ends.
            assert int(re.search(r'"rows":256,"n":(\d+)', done.stdout)[1]) >= 65
            assert "BROKEN rms-norm-v1/rows: rows " in done.stdout
        if "isobit contract new" in command:
            assert "FILL IN" in (tmp_path / "rms-norm-v1.contract.yaml").read_text()
            (tmp_path / "rms-norm-v1.contract.yaml").write_text(files["rms-norm-v1.contract.yaml"])
        seen.append(command)
    assert (tmp_path / "verdicts.html").read_text().startswith("<!doctype html>")
