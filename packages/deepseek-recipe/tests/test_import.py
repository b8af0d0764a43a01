"""What importing the package costs: no torch, nothing of an engine, nothing that is not used."""

import subprocess
import sys

import deepseek_recipe


def modules_after(code: str) -> set[str]:
    """The modules that are loaded after some code has run in a fresh interpreter."""
    command = [sys.executable, "-c", f"import sys\n{code}\nprint(*sys.modules)"]
    return set(subprocess.run(command, capture_output=True, text=True, check=True).stdout.split())


def test_import_loads_neither_torch_nor_an_engine() -> None:
    loaded = modules_after(
        "import deepseek_recipe\nfor name in deepseek_recipe.__all__: getattr(deepseek_recipe, name)"
    )
    assert {"torch", "deepinfer", "deepspark"} & loaded == set()


def test_the_bare_import_loads_almost_nothing() -> None:
    assert {"tokenizers", "PIL", "httpx", "deepseek_recipe.chat_request"} & modules_after(
        "import deepseek_recipe"
    ) == set()


def test_prompts_and_parsing_need_no_extra() -> None:
    loaded = modules_after("from deepseek_recipe import encode_chat, StreamProcessor, ResponsesRequest")
    assert {"PIL", "httpx"} & loaded == set()


def test_every_public_name_is_there() -> None:
    assert [name for name in deepseek_recipe.__all__ if not hasattr(deepseek_recipe, name)] == []
    assert dir(deepseek_recipe) == sorted(deepseek_recipe.__all__)
    assert not hasattr(deepseek_recipe, "no_such_name")
