# SPDX-License-Identifier: Apache-2.0
"""`import puzzle` and transformers in any order: the Auto classes know the child, and nothing is imported early."""

import subprocess
import sys
from pathlib import Path

import pytest

ORDERS = {
    "puzzle first": "import puzzle; import transformers",
    "Auto config first": "from transformers import AutoConfig; import puzzle",
    "Auto model first": "from transformers import AutoModelForCausalLM; import puzzle",
}
MORE_ORDERS = {
    "transformers first": "import transformers; import puzzle",
    "Llama first": "from transformers import LlamaForCausalLM; import puzzle",
    "puzzle, then Llama": "import puzzle; from transformers import LlamaForCausalLM",
    "modeling alone": "from puzzle.modeling import DeciLMForCausalLM",
    "twice": "import puzzle; puzzle.register(); import transformers; puzzle.register()",
    "pipelines": "import puzzle; from transformers import pipeline, Trainer",
}
LOADS = """
import sys
from transformers import AutoConfig, AutoModelForCausalLM
config = AutoConfig.from_pretrained(sys.argv[1])
assert type(config).__module__ == "puzzle.modeling", type(config)
model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
assert type(model).__module__ == "puzzle.modeling", type(model)
assert type(AutoModelForCausalLM.from_config(config)) is type(model)
import puzzle.modeling
assert type(model) is puzzle.modeling.DeciLMForCausalLM and type(config) is puzzle.modeling.DeciLMConfig
assert type(AutoConfig.for_model("llama")).__name__ == "LlamaConfig"
"""


def python(program: str, *arguments: object) -> str:
    command = [sys.executable, "-c", program, *map(str, arguments)]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.fixture(scope="session")
def child(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from puzzle.modeling import DeciLMConfig, DeciLMForCausalLM

    folder = tmp_path_factory.mktemp("child")
    blocks = [{"attention": {"no_op": True}, "ffn": {}}, {"attention": {}, "ffn": {"replace_with_linear": True}}]
    sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2}
    DeciLMForCausalLM(DeciLMConfig(blocks, num_hidden_layers=2, **sizes)).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("order", [*ORDERS, *(pytest.param(o, marks=pytest.mark.slow) for o in MORE_ORDERS)])
def test_auto_classes_know_the_child(order: str, child: Path) -> None:
    python({**ORDERS, **MORE_ORDERS}[order] + LOADS, child)


def test_importing_puzzle_imports_nothing_heavy() -> None:
    loaded = python("import sys, puzzle; print(*sorted({m.split('.')[0] for m in sys.modules}))").split()
    assert not {"torch", "transformers", "numpy", "pandas", "pydantic", "typer"} & set(loaded)


def test_the_hook_is_installed_once() -> None:
    program = (
        "import sys, puzzle, importlib\n"
        "puzzle.register()\n"
        "importlib.reload(puzzle)\n"
        "print(sum(type(f).__module__ == 'puzzle.registration' for f in sys.meta_path))"
    )
    assert python(program).strip() == "1"


def test_other_modules_of_transformers_are_untouched() -> None:
    """The hook serves its three names only, and the patched modules keep their own loader's data."""
    program = (
        "import puzzle, transformers.models.auto.configuration_auto as c, transformers.models.auto.modeling_auto as m\n"
        "import transformers.models.llama as l\n"
        "assert c.__file__.endswith('configuration_auto.py') and m.__spec__.origin == m.__file__\n"
        "assert c.CONFIG_MAPPING_NAMES['llama'] == 'LlamaConfig'\n"
        "assert c.CONFIG_MAPPING_NAMES['nemotron-nas'] == 'DeciLMConfig'\n"
        "assert 'puzzle' not in type(l.__spec__.loader).__module__\n"
    )
    python(program)
