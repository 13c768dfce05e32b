"""How a supervisor gets the driver's token: from the environment, or from a file that only its owner can read.

The token never appears on a command line, which other users of a machine can read.
"""

from __future__ import annotations

import os
import secrets
from pathlib import Path

from drivetrain import ConfigurationError

__all__ = ["TOKEN_VARIABLE", "TokenFile", "read_token"]

TOKEN_VARIABLE = "DRIVETRAIN_WORKER_TOKEN"
_MAX_CHARACTERS = 128


class TokenFile:
    """A file with the token, in a directory that all nodes share.

    Args:
        directory: the directory.
        token: the token.

    Attributes:
        path: the path of the file.

    Raises:
        ConfigurationError: the file cannot be created.
    """

    def __init__(self, directory: Path, token: bytes) -> None:
        self.path = directory.absolute() / f".drivetrain-token-{secrets.token_hex(8)}"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
        try:
            with open(os.open(self.path, flags, 0o600), "w") as file:
                file.write(token.hex())
        except OSError as error:
            raise ConfigurationError(
                f"[DT-113] CommandRuntime: token_directory: expected a writable directory, got {directory} ({error})"
            ) from error

    def delete(self) -> None:
        """Delete the file, if it still exists."""
        self.path.unlink(missing_ok=True)


def read_token(path: str | None) -> bytes:
    """Return the token in a supervisor. It is removed from the environment, so that the worker does not inherit it.

    Args:
        path: the path of the file; None to read the environment.

    Raises:
        ConfigurationError: the token is missing.
    """
    text = os.environ.pop(TOKEN_VARIABLE, None)
    if path is not None:
        try:
            with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)) as file:
                text = file.read(_MAX_CHARACTERS)
        except OSError as error:
            raise ConfigurationError(
                f"[DT-311] the token of the driver cannot be read ({error}). Set token_directory to a directory that "
                "all nodes share"
            ) from error
    if not text:
        raise ConfigurationError(
            f"[DT-311] expected the token of the driver in the environment variable {TOKEN_VARIABLE}, got none. The "
            "command does not pass its environment to the workers: set token_directory to a directory that all nodes "
            "share"
        )
    return bytes.fromhex(text)
