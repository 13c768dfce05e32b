"""Hides credentials in URIs before they are shown or written."""

from __future__ import annotations

import re
from urllib.parse import unquote

__all__ = ["redact"]

# A URI ends at white space, a quote or a backslash, so a text may contain any number of them. A backslash and "u" are
# how JSON writes other characters.
_USER_INFO = re.compile(
    r"""://(?:
        # user:password@, where the password may contain / and @, but host:port/ is not such a pair
        [^\s"'\\/?\#:@\[]*:(?!\d+(?:[/?\#]|$))(?:[^\s"'\\]|\\u[0-9a-f]{4})*@
        # user@
        |[^\s"'\\/?\#]*@
    )""",
    re.VERBOSE,
)
_OPTION = re.compile(r"""([?&;\#])([^=&;\#?\s"'\\]+)=((?:[^&;\#\s"'\\]|\\u[0-9a-f]{4})*)""")
_SECRET_NAME = re.compile(
    r"key|secret|token|pass|pwd|cred|signature|auth(?!or)|(?:^|[_.-])(?:pw|sig|sas)(?:$|[_.-])", re.IGNORECASE
)


def redact(text: str) -> str:
    """Returns a text in which the credentials of its URIs are replaced by ``***``.

    Credentials are a user name and password before the host, and options whose names look like those of a key, a
    token, a signature, a password or a credential.
    """
    if "://" in text:
        text = _USER_INFO.sub("://***@", text)
    return _OPTION.sub(_redact_option, text)


def _redact_option(match: re.Match[str]) -> str:
    separator, name, _ = match.groups()
    return f"{separator}{name}=***" if _SECRET_NAME.search(unquote(name)) else match[0]
