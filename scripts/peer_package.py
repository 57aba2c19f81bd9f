"""Peers that are Python packages with a compiled part: which versions load here, and a sentence where none does."""

from __future__ import annotations

import importlib
import importlib.metadata
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch


class PeerUnavailableError(RuntimeError):
    """The peer cannot be timed here; the message says why, and what would help."""


@dataclass(frozen=True, kw_only=True)
class PeerPackage:
    """A peer.

    Attributes:
        module: what is imported.
        name, known_good: of the distribution, and its version that was timed.
        needs: names that the module must have.
        beside: other requirements of pip that the known version has.
    """

    module: str
    name: str
    known_good: str
    needs: tuple[str, ...] = ()
    beside: tuple[str, ...] = ()

    def version(self) -> str:
        """Of the installed package; "unknown" without one of that name."""
        try:
            return importlib.metadata.version(self.name)
        except importlib.metadata.PackageNotFoundError:
            return "unknown"

    def load(self, import_module: Callable[[str], Any] = importlib.import_module) -> Any:
        """The module.

        Raises:
            PeerUnavailableError: it is missing, does not load with this torch, or lacks a name.
        """
        line = " ".join(("pip install", f"{self.name}=={self.known_good}", *self.beside))
        try:
            module = import_module(self.module)
        except ModuleNotFoundError as error:
            if error.name != self.module:
                raise PeerUnavailableError(f"{self.module} needs the package {error.name}; {line}") from error
            raise PeerUnavailableError(f"{self.module} is not installed; {line}") from error
        except (ImportError, OSError, RuntimeError) as error:
            beside = f"torch {torch.__version__} ({first_line(error)})"
            raise PeerUnavailableError(f"{self.name} {self.version()} does not load with {beside}; {line}") from error
        missing = [name for name in self.needs if not hasattr(module, name)]
        if missing:
            raise PeerUnavailableError(f"{self.name} {self.version()} has no {', '.join(missing)}; {line}")
        return module


def first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)
