"""What is asked of one model's modules, and what was decided for each while SGLang built them."""

from __future__ import annotations

from dataclasses import dataclass, field

from ...config import Options
from ...errors import ConfigError
from ...scheme import Scheme


@dataclass
class Decisions:
    """Shared by the configuration and the methods of one model.

    Attributes:
        options: of the user.
        schemes: of every module that has a method of ours, by full name, in building order.
        refused: modules that can't be served as asked; the start fails with the first one, unless the
            built model shows that the module stays in high precision (`vision_towers.py`).
    """

    options: Options
    schemes: dict[str, Scheme] = field(default_factory=dict)
    refused: dict[str, ConfigError] = field(default_factory=dict)

    def record(self, module: str, scheme: Scheme) -> None:
        """The scheme that `module` is served with; the latest counts."""
        self.schemes[module] = scheme

    def leave_in_high_precision(self, module: str, scheme: Scheme) -> None:
        """`module` is not quantized after all, so nothing about it can be refused."""
        self.refused.pop(module, None)
        self.record(module, scheme)

    def raise_refused(self) -> None:
        """Fail for the first module that can't be served as asked.

        Raises:
            ConfigError: as recorded.
        """
        for error in self.refused.values():
            raise error
