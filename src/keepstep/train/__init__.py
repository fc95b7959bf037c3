"""One loop for every kind of run: assemble (trainer), decide when (loop), compute (step).

The module can be called: `keepstep.train("run.yaml")` is `keepstep.library.training.train`.
"""

import importlib
import sys
from types import ModuleType
from typing import Any


class _CallableModule(ModuleType):
    def __call__(self, *arguments: Any, **named: Any) -> Any:
        """See keepstep.library.training.train."""
        return importlib.import_module("keepstep.library.training").train(*arguments, **named)


sys.modules[__name__].__class__ = _CallableModule
