"""The planted faults fit the package as it is."""

from __future__ import annotations

import pathlib

import pytest

import torch_grad_exporter
from tests.mutants.faults import BY_FOLDER, FAR, FAULTS, Fault

PACKAGE = pathlib.Path(torch_grad_exporter.__file__).parent
TESTS = pathlib.Path(__file__).resolve().parent.parent


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_each_fault_can_be_planted(fault: Fault) -> None:
    """The text that a fault replaces stands in its file once, what takes its place compiles, and its tests are there."""
    content = (PACKAGE / fault.file).read_text("utf-8")
    assert content.count(fault.text) == 1
    assert fault.instead != fault.text
    compile(content.replace(fault.text, fault.instead), fault.file, "exec")
    assert all((TESTS / path).is_file() for path in (*fault.nearest, *fault.wider, *FAR))


def test_no_two_faults_are_the_same() -> None:
    """No two faults share a name or a place."""
    assert len(FAULTS) == 128
    assert len({fault.name for fault in FAULTS}) == 128
    assert len({(fault.file, fault.text) for fault in FAULTS}) == 128


def test_faults_are_spread_over_the_folders() -> None:
    """Each folder of the package that has code has faults, and none more than one of six; these lie in 83 different files."""
    folders = {file.parent.relative_to(PACKAGE).parts[0] for file in PACKAGE.glob("*/**/*.py") if file.name != "__init__.py"}
    assert folders | {""} == set(BY_FOLDER)
    assert all({pathlib.Path(fault.file).parts[0] for fault in some} == {folder} for folder, some in BY_FOLDER.items() if folder)
    assert all("/" not in fault.file for fault in BY_FOLDER[""])
    spread = [fault for some in BY_FOLDER.values() for fault in some]
    assert max(map(len, BY_FOLDER.values())) <= len(spread) / 6
    assert len({fault.file for fault in spread}) == len(spread) == 83
