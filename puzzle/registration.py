# SPDX-License-Identifier: Apache-2.0
"""Makes transformers' Auto classes know `model_type: nemotron-nas`, without importing transformers.

`AutoConfig.register` would need transformers and torch at `import puzzle`, seconds that `puzzle search` and `--help` do
not have to spend; and registering while transformers is half imported runs into its own circular imports. So an import
hook adds the two names to transformers' lazy tables when these load, and serves the module that the tables name.
"""

import importlib.machinery
import sys
from collections.abc import Sequence
from types import ModuleType

MODEL_TYPE = "nemotron-nas"
_TABLES = {  # module of transformers -> {table in it: our entry}
    "transformers.models.auto.configuration_auto": {
        "CONFIG_MAPPING_NAMES": "DeciLMConfig",
        "MODEL_NAMES_MAPPING": "DeciLM",  # transformers 5.0 looks the names of all types up while it loads
    },
    "transformers.models.auto.modeling_auto": {"MODEL_FOR_CAUSAL_LM_MAPPING_NAMES": "DeciLMForCausalLM"},
}
_MODULE = "transformers.models.nemotron_nas"


class _Finder:
    """Finder and loader; without importlib.abc's base classes, whose import takes longer than all the rest here."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name == _MODULE:
            return importlib.machinery.ModuleSpec(name, self)
        if name not in _TABLES:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_add(module: ModuleType) -> None:
                execute(module)
                _add(module)

            spec.loader.exec_module = execute_and_add  # type: ignore[method-assign]
        return spec

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> None:
        """The import system's own module will do."""

    def exec_module(self, module: ModuleType) -> None:
        import puzzle.modeling

        module.__dict__.update({name: getattr(puzzle.modeling, name) for name in puzzle.modeling.__all__})


def _add(module: ModuleType) -> None:
    for table, entry in _TABLES[module.__name__].items():
        getattr(module, table, {}).setdefault(MODEL_TYPE, entry)  # a transformers that brings its own keeps it


def register() -> None:
    """Install the hook once; where the Auto classes are loaded already, register in transformers' own way."""
    if any(isinstance(finder, _Finder) for finder in sys.meta_path):
        return
    sys.meta_path.insert(0, _Finder())
    configs, models = (sys.modules.get(name) for name in _TABLES)
    if models is not None:
        from puzzle.modeling import DeciLMConfig, DeciLMForCausalLM

        configs.AutoConfig.register(MODEL_TYPE, DeciLMConfig, exist_ok=True)  # type: ignore[union-attr]
        models.AutoModelForCausalLM.register(DeciLMConfig, DeciLMForCausalLM, exist_ok=True)
    elif configs is not None:
        _add(configs)
