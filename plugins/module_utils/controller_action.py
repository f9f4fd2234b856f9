"""The base class of action plugins that run on the controller only, without a connection to a host."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any

from ansible.plugins.action import ActionBase


class ControllerAction(ActionBase):
    """The base class of an action plugin that runs on the controller only.

    A subclass returns its result from the method `decide`.

    The options and the result of the action X are documented in plugins/modules/X.yml.
    """

    _requires_connection = False
    _supports_check_mode = True

    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        result: dict[str, Any] = super().run(tmp, task_vars)
        return {**result, "changed": False, **self.decide(self._task.args, task_vars or {})}

    @abstractmethod
    def decide(self, asked: Mapping[str, Any], variables: Mapping[str, Any]) -> dict[str, Any]:
        """Return the result of the task.

        asked: the arguments of the task. variables: all variables of the host of the task.
        """
