"""The contract type `room` of tools/room_contract.py keeps its doors: listed imports pass, every other is named."""

import grimp
import pytest
from room_contract import RoomContract

ENGINE = {"room": "house.engine", "outside": ["house.engine.porch"], "may_import": ["house.model", "torch"]}


def _graph(*imports: tuple[str, str]) -> grimp.ImportGraph:
    graph = grimp.ImportGraph()
    for module in (
        "house",
        "house.engine",
        "house.engine.loop",
        "house.engine.porch",
        "house.model",
        "house.model.moe",
    ):
        graph.add_module(module)
    graph.add_module("house.llm")
    for module in ("torch", "torchvision", "json"):
        graph.add_module(module, is_squashed=True)
    for importer, imported in imports:
        graph.add_import(importer=importer, imported=imported, line_number=7, line_contents=f"import {imported}")
    return graph


def _contract(options: dict[str, object]) -> RoomContract:
    return RoomContract(name="engine", session_options={"root_packages": ["house"]}, contract_options=options)


@pytest.mark.parametrize("imported", ["house.engine", "house.model", "house.model.moe", "torch", "json"])
def test_open_doors(imported: str) -> None:
    assert _contract(ENGINE).check(_graph(("house.engine.loop", imported)), verbose=False).kept


@pytest.mark.parametrize("imported", ["house", "house.llm", "house.engine.porch", "torchvision"])
def test_closed_doors(imported: str) -> None:
    check = _contract(ENGINE).check(_graph(("house.engine.loop", imported)), verbose=False)
    assert not check.kept
    assert check.metadata["violations"] == [("house.engine.loop", imported, [7])]


def test_a_room_outside_is_judged_by_its_own_contract() -> None:
    assert _contract(ENGINE).check(_graph(("house.engine.porch", "house.llm")), verbose=False).kept


def test_a_misspelt_room_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"house\.engin,"):
        _contract({**ENGINE, "room": "house.engin"}).check(_graph(), verbose=False)
