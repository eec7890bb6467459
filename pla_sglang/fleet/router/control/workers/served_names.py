"""Which names of models and adapters the workers serve: the only ones that become labels of series."""

from __future__ import annotations

from pla_sglang.fleet.router.control.workers.discovery import Description
from pla_sglang.fleet.router.wire.messages import Ask

MOST_NAMES = 20  # that are labels of their own, the first ones
OTHER = "other"  # the label of those beyond


class ServedNames:
    """Names that workers have said, former ones included."""

    def __init__(self) -> None:
        self._labels: dict[str, str] = {}  # by what a request may name
        self._models: set[str] = set()
        self._default = ""  # of requests that name nothing that is served: the model, while there is one only

    def add(self, said: Description) -> None:
        if said.model:
            self._models.add(said.model)
            self._add_label(said.model, said.model)
            self._default = self._labels[said.model] if len(self._models) == 1 else ""
        for adapter in sorted(said.adapters or ()):
            self._add_label(adapter, adapter)
            self._labels[f"{said.model}:{adapter}"] = self._labels[adapter]  # SGLang's form in ``model``

    def _add_label(self, name: str, label: str) -> None:
        if name not in self._labels:
            taken = set(self._labels.values()) - {OTHER}
            self._labels[name] = label if len(taken) < MOST_NAMES else OTHER

    def find_label(self, ask: Ask) -> str:
        """The adapter or model that a request names. An instance serves whatever name it is given with its model, so a
        name that nobody serves is as good as none."""
        return self._labels.get(ask.adapter or ask.model, self._default)
