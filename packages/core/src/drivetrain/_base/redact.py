"""Hides credentials in URIs before they are shown or written."""

from __future__ import annotations

import re
from urllib.parse import unquote

__all__ = ["redact"]

# A text may contain several URIs. Each ends at white space, a quote or a backslash, except that a backslash followed by
# "u" is a character that JSON has escaped.
_AFTER_SCHEME = re.compile(r"""://((?:[^\s"'\\]|\\u[0-9a-f]{4})+)""")
# A user name and the start of a password, which may contain "/" and "@". "host:port/" does not match.
_USER_AND_PASSWORD = re.compile(r"[^/?#:@\[]*:(?!\d+(?:[/?#]|$))")
_AUTHORITY_END = re.compile(r"[/?#]")
_OPTION = re.compile(r"""([?&;\#])([^=&;\#?\s"'\\]+)=((?:[^&;\#\s"'\\]|\\u[0-9a-f]{4})*)""")
_SECRET_NAME = re.compile(
    r"key|secret|token|pass|pwd|cred|signature|auth(?!or)|(?:^|[_.-])(?:pw|sig|sas)(?:$|[_.-])", re.IGNORECASE
)


def redact(text: str) -> str:
    """Return a text in which the credentials of its URIs are replaced by ``***``.

    Credentials are a user name and password before the host, and the values of options whose names suggest a key, a
    token, a signature, a password or a credential.
    """
    if "://" in text:
        text = _AFTER_SCHEME.sub(_redact_user_info, text)
    return _OPTION.sub(_redact_option, text)


def _redact_user_info(match: re.Match[str]) -> str:
    """Redact the text after a scheme, in linear time because the text may be long and untrusted."""
    return "".join(f"://{_without_user_info(part)}" for part in match[1].split("://"))


def _without_user_info(address: str) -> str:
    if (pair := _USER_AND_PASSWORD.match(address)) is not None:
        at = address.rfind("@", pair.end())
    else:
        end = _AUTHORITY_END.search(address)
        at = address.rfind("@", 0, len(address) if end is None else end.start())
    return address if at < 0 else f"***{address[at:]}"


def _redact_option(match: re.Match[str]) -> str:
    separator, name, _ = match.groups()
    return f"{separator}{name}=***" if _SECRET_NAME.search(unquote(name)) else match[0]
