"""Theorem: a folder of somebody else's cannot hang a command, fill its memory, or make it show files of ours."""

import os

import pytest

from isobit.cli import main
from isobit.contracts.language.load import load_contract
from isobit.contracts.store.opened_files import ABSENT, hash_file
from isobit.errors import ContractError
from isobit.foundation import files
from tests.attacks.judged_place import places

COMMANDS = ["contract", "status"], ["contract", "lint"], ["verify", "--level", "L2"]


@pytest.fixture
def here(tmp_path, monkeypatch):
    return places(tmp_path, monkeypatch)("right")


def without_end(path, how):
    if how == "a pipe":
        os.mkfifo(path)
    elif how == "a huge file":
        with open(path, "wb") as file:
            file.truncate(1 << 40)
    else:
        path.symlink_to("/dev/zero")


@pytest.mark.parametrize("how", ["a pipe", "a huge file", "a device"])
def test_a_contract_without_end_is_refused(here, how, capsys):
    """Before, a link to /dev/zero filled the memory of every command, and a pipe stopped it."""
    path = here.path / "endless.contract.yaml"
    without_end(path, how)
    for words in COMMANDS:
        assert main.main(words) in (1, 2)
    assert "endless.contract.yaml" in capsys.readouterr().out
    with pytest.raises(ContractError, match=r"not a regular file|larger than"):
        load_contract(path)


def test_a_link_out_of_the_folder_does_not_show_what_it_leads_to(here, tmp_path_factory, capsys):
    secret = tmp_path_factory.mktemp("ours") / "key"
    secret.write_text("hunter2\n")
    (here.path / "linked.contract.yaml").symlink_to(secret)
    for words in COMMANDS:
        assert main.main(words) in (1, 2)
    shown = "".join(capsys.readouterr())
    assert "a link to a file elsewhere" in shown
    assert "hunter2" not in shown


def test_a_link_inside_the_folder_is_a_contract(here, capsys):
    (here.path / "inner").mkdir()
    (here.path / "inner" / "contract.yaml").symlink_to(here.contract)
    assert main.main(["contract", "lint"]) == 0
    capsys.readouterr()


def test_evidence_cannot_have_the_systems_own_files_read(tmp_path):
    (tmp_path / "link").symlink_to("/proc/self/status")
    assert hash_file("/proc/self/status") == hash_file(str(tmp_path / "link")) == ABSENT
    (tmp_path / "plain").write_text("1")
    assert hash_file(str(tmp_path / "plain")) != ABSENT


def test_a_file_of_the_largest_size_is_read(tmp_path):
    (tmp_path / "file").write_bytes(b"1234")
    assert files.read_bytes(tmp_path / "file", 4) == b"1234"
    with pytest.raises(OSError, match="larger than 3 bytes"):
        files.read_bytes(tmp_path / "file", 3)


@pytest.mark.parametrize(
    "words",
    [
        ["contract", "status"],
        ["contract", "status", "--json"],
        ["contract", "graph"],
        ["contract", "lint"],
    ],
    ids=" ".join,
)
def test_a_reader_who_leaves_early_is_no_verdict(here, words, monkeypatch, capsys):
    """`isobit contract status | head -1` once ended with 1, which means broken."""
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "w") as stream:
        monkeypatch.setattr("sys.stdout", stream)
        assert main.main(words) == 2
    assert capsys.readouterr().err == ""
