"""Hides credentials in URIs before they are shown or written."""

from __future__ import annotations

import re
from typing import Any
from urllib.parse import unquote

__all__ = ["MaskedOptions", "redact"]

# A text may contain several URIs. Each ends at white space, at a quote or at a backslash. A backslash followed by "u"
# does not end the URI, because it is a character that JSON has escaped.
_AFTER_SCHEME = re.compile(r"""://((?:[^\s"'\\]|\\u[0-9a-f]{4})+)""")
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*$")
_MAX_SCHEME_CHARS = 32
# A user name and the start of a password, which may contain "/" and "@".
_USER_AND_PASSWORD = re.compile(r"([^/?#:@\[]*):")
_PORT = re.compile(r"\d{1,5}(?:[/?#]|$)")
_AUTHORITY_END = re.compile(r"[/?#]")

# In these schemes, "name:123/" is a host and a port, even if an "@" follows in the path or the query.
_SCHEMES_OF_SERVERS = {"grpc", "hdfs", "http", "https", "ray", "tcp", "viewfs", "webhdfs"}
# In these schemes, "name:123/x@host" begins with a user name and a password that contains a slash. If the name contains
# a dot or is "localhost", it begins with a host and a port instead. In all other schemes, such as
# "s3://name:123/x@bucket", it always begins with a user name and a password.
_SCHEMES_WITH_PORTS = {"ftp", "git+https", "git+ssh", "sftp", "ssh", "ws", "wss"}
# In these schemes, a container precedes the "@": "abfs://container@account.dfs.core.windows.net/x".
_SCHEMES_WITH_CONTAINERS = {"abfs", "abfss", "wasb", "wasbs"}

_OPTION = re.compile(r"""([?&;\#])([^=&;\#?\s"'\\]+)=((?:[^&;\#\s"'\\]|\\u[0-9a-f]{4})*)""")

# The words of a name: "X-Amz-Signature", "account_key" and "sharedAccessKey" have three, two and three.
_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
_SECRET_WORD = re.compile(
    r"""
    (?:access|account|api|app|auth|bearer|client|id|private|refresh|secret|session|shared|user)*
    (?:key|secrets?|token|pass|password|passwd|passphrase|passcode|pwd|pw|credentials?|creds?|cred
    |signature|sig|sas|auth|oauth|authorization|jwt)
    (?:id)?
    """,
    re.VERBOSE,
)


def redact(text: str) -> str:
    """Return a text in which the credentials of its URIs are replaced by ``***``.

    Credentials are the user name and the password before the host, and the values of secret options, as in
    ``?name=value``. An option is secret if its name contains a word for a key, a token, a signature, a password or a
    credential. Only whole words count: ``api_key`` and ``accessToken`` are secret; ``tokenizer``, ``max_tokens`` and
    ``passed`` are not. ``code`` and ``auth_code`` are secret; ``exit_code`` is not.
    """
    if "://" in text:
        text = _AFTER_SCHEME.sub(_redact_user_info, text)
    return _OPTION.sub(_redact_option, text)


class MaskedOptions(dict[str, Any]):
    """Options whose ``repr()`` shows ``***`` instead of the values of secret options."""

    def __repr__(self) -> str:
        return repr({name: "***" if _is_secret(name) else value for name, value in self.items()})

    def __reduce__(self) -> tuple[Any, ...]:
        return MaskedOptions, (dict(self),)


def _redact_user_info(match: re.Match[str]) -> str:
    """Redact the text after a scheme. This takes linear time, because the text may be long and untrusted."""
    before = match.string[max(0, match.start() - _MAX_SCHEME_CHARS) : match.start()]
    parts = []
    for part in match[1].split("://"):
        parts.append(f"://{_without_user_info(part, before[-_MAX_SCHEME_CHARS:])}")
        before = part
    return "".join(parts)


def _without_user_info(address: str, before: str) -> str:
    pair = _USER_AND_PASSWORD.match(address)
    if pair is not None and not _is_host_and_port(address, pair, before):
        at = address.rfind("@", pair.end())
    else:
        end = _AUTHORITY_END.search(address)
        at = address.rfind("@", 0, len(address) if end is None else end.start())
        if _scheme(before) in _SCHEMES_WITH_CONTAINERS and ":" not in address[: max(at, 0)]:
            return address
    return address if at < 0 else f"***{address[at:]}"


def _is_host_and_port(address: str, pair: re.Match[str], before: str) -> bool:
    if _PORT.match(address, pair.end()) is None:
        return False
    scheme = _scheme(before)
    if scheme in _SCHEMES_OF_SERVERS:
        return True
    return scheme in _SCHEMES_WITH_PORTS and ("." in pair[1] or pair[1] == "localhost")


def _scheme(before: str) -> str:
    match = _SCHEME.search(before)
    return match[0].lower() if match else ""


def _redact_option(match: re.Match[str]) -> str:
    separator, name, _ = match.groups()
    return f"{separator}{name}=***" if _is_secret(unquote(name)) else match[0]


def _is_secret(name: str) -> bool:
    words = [word.lower() for word in _WORD.findall(name)]
    return words in (["code"], ["auth", "code"]) or any(_SECRET_WORD.fullmatch(word) for word in words)
