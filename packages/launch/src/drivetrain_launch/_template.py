"""The template of a command line: parsed like a shell does it, but never executed by a shell."""

from __future__ import annotations

import re
import shlex
import string
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from drivetrain import ConfigurationError

__all__ = ["Template", "check_hosts"]

_FIELDS = ("host", "n", "worker")
_HOST = re.compile(r"[\w.@:%\[\]-]+")
_SHELLS = ("bash", "dash", "ksh", "sh", "zsh")
_REMOTE_SHELLS = ("autossh", "clush", "pdsh", "rsh", "ssh")
"""Programs that join their arguments with spaces and pass them to a shell on another machine."""
_EXAMPLE = '"srun -n {n} {worker}"'


@dataclass(frozen=True, slots=True)
class Template:
    """A parsed template.

    Attributes:
        text: the template, for messages.
        words: the words of the command line, which may contain fields.
        fields: the names of the fields.
    """

    text: str
    words: tuple[str, ...]
    fields: frozenset[str]

    @classmethod
    def parse(cls, text: str) -> Template:
        """Parse a template.

        Raises:
            ConfigurationError: the template has unbalanced quotes or braces, an unknown field, or no ``{worker}``; or a
                word ``{worker}`` is in the wrong place.
        """
        if not isinstance(text, str):
            raise _invalid(f"expected a command line such as {_EXAMPLE}, got {text!r}")
        try:
            words = tuple(shlex.split(text))
            fields = [_field(*part) for word in words for part in string.Formatter().parse(word)]
        except ValueError as error:
            raise _invalid(f"{error} in {text!r}. Close quotes, and write literal braces as {{{{ and }}}}") from error
        names = frozenset(name for name in fields if name is not None)
        if unknown := sorted(names - set(_FIELDS)):
            raise _invalid(f"expected the fields {{host}}, {{n}} and {{worker}}, got {{{unknown[0]}}} in {text!r}")
        if "worker" not in names:
            raise _invalid(f"expected the field {{worker}}, as in {_EXAMPLE}, got {text!r}")
        if {"host", "n"} <= names:
            raise _invalid(
                f"expected {{n}}, to start all workers at once, or {{host}}, to start one worker on each host, "
                f"got both in {text!r}"
            )
        _check_position(words)
        return cls(text, words, names)

    @property
    def starts_all_workers(self) -> bool:
        """True if one command starts all workers; False if the command is started once for each worker."""
        return "n" in self.fields

    @property
    def program(self) -> str:
        """The name or the path of the program; with fields if it contains fields."""
        return self.words[0]

    def fill(self, *, num_workers: int, worker: Sequence[str], host: str = "") -> list[str]:
        """Return the command line.

        A word that consists of ``{worker}`` alone is replaced by the words of the worker's command. They are quoted if
        the program is one that passes its arguments to a shell on another machine. Inside of a longer word, which is
        usually a command for a shell, ``{worker}`` is replaced by the shell-quoted command.

        Args:
            num_workers: the value of ``{n}``.
            worker: the command that starts one worker.
            host: the value of ``{host}``.

        Raises:
            ConfigurationError: it is unknown whether a shell will parse the command, and the shell would change it.
        """
        values = {"n": num_workers, "host": host, "worker": shlex.join(worker)}
        filled: list[str] = []
        for word in self.words:
            filled += self._words_for_program(worker) if word == "{worker}" else [word.format(**values)]
        return filled

    def _words_for_program(self, worker: Sequence[str]) -> list[str]:
        quoted = [shlex.quote(word) for word in worker]
        if any(word.rpartition("/")[2] in _REMOTE_SHELLS for word in self.words):
            return quoted
        if "host" in self.fields and quoted != list(worker):
            changed = next(word for word in worker if shlex.quote(word) != word)
            raise _invalid(
                f"expected words that a shell does not change after {self.program!r}, which may pass them to a shell "
                f"on another machine, got {changed!r}. Use a path of letters and digits for the interpreter or, if the "
                f"program uses a shell, write {{worker}} inside of quotes: {self.program} {{host}} 'exec {{worker}}'"
            )
        return list(worker)


def _check_position(words: Sequence[str]) -> None:
    """Check the position of a word that consists of ``{worker}`` alone, which becomes several words.

    Raises:
        ConfigurationError: other words follow, which the worker would receive as arguments; or the word is a shell's
            command, of which the shell would execute only the first word.
    """
    if "{worker}" not in words:
        return
    position = words.index("{worker}")
    if position + 1 < len(words):
        raise _invalid(f"expected {{worker}} as the last word, got {words[position + 1]!r} after it")
    program, option = ["", "", *words[:position]][-2:]
    if program.rpartition("/")[2] in _SHELLS and re.fullmatch("-[a-z]*c", option):
        raise _invalid(f"expected 'exec {{worker}}' after {program} {option}, got '{{worker}}'")


def _field(literal: str, name: str | None, spec: str | None, conversion: str | None) -> str | None:
    """Return the name of a field, including anything that is not part of a plain name; None for text only."""
    if name is None:
        return None
    return name + (f"!{conversion}" if conversion else "") + (f":{spec}" if spec else "")


def check_hosts(hosts: Iterable[Any], template: Template) -> tuple[str, ...]:
    """Check the hosts for a template. They become arguments of the command, so they must not look like options.

    Raises:
        ConfigurationError: a host is invalid, or there are no hosts although the template contains ``{host}``, or
            there are hosts that the template does not use.
    """
    if isinstance(hosts, str):
        raise _invalid(f"hosts: expected a list of host names, got {hosts!r}")
    hosts = tuple(hosts)
    for host in hosts:
        if not isinstance(host, str) or not _HOST.fullmatch(host) or host.startswith("-"):
            raise _invalid(f"hosts: expected names such as 'node1' or 'user@node1', got {host!r}")
    if "host" in template.fields and not hosts:
        raise _invalid(
            f"expected hosts for {template.text!r}, got none. Set hosts=[...], or the environment variable "
            "DRIVETRAIN_HOSTS to host names separated by commas"
        )
    if hosts and "host" not in template.fields:
        raise _invalid(f"hosts: expected the field {{host}} in the template, got {template.text!r}")
    return hosts


def _invalid(problem: str) -> ConfigurationError:
    return ConfigurationError(f"[DT-113] CommandRuntime: {problem}")
