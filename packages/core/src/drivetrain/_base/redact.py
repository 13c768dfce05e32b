"""Hides credentials before text and configurations are shown or written.

:func:`redact` works on text: URIs, assignments such as ``API_KEY=...`` and ``'token': '...'``, and ``Bearer ...``.
:func:`masked` and :func:`describe` work on configurations, by the names of their values.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import unquote

__all__ = ["MaskedOptions", "as_text", "describe", "masked", "redact", "redact_strings"]

_MASK = "***"

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
    (?:key|secrets?|token|pass|passwords?|passwd|passphrase|passcode|pwd|pw|credentials?|creds?|cred
    |signature|sig|sas|auth|oauth|authorization|jwt)
    (?:id)?
    """,
    re.VERBOSE,
)
_SECRET_PLURAL = re.compile(r"(?:access|api|private|secret)keys|(?:access|api|auth)tokens")
_SPECIAL_TOKEN = re.compile(r"(?:bos|cls|eos|mask|pad|sep|special|unk)token")
"""The names of a tokenizer's special tokens, which are not secret."""

_PASSWORD = re.compile(r"pass(?:word|wd|phrase|code)|pwd|secret|pin$")
"""The names whose values are secret even if they are numbers. Other numbers are settings, such as ``pad_token_id``."""

# A name may be quoted, as in JSON and in the repr() of a dict. Quotes may be escaped, as in JSON that contains JSON.
_ASSIGNMENT = re.compile(
    r"""(?<![\w.-])(?P<name>[A-Za-z_][\w.-]*)(?P<end>(?:\\*["']\]?)?)(?P<separator>\s*(?:==?|:)\s*)"""
)
_VALUE = re.compile(
    r"""
    [bBrRfFuU]{0,2}
    (?:
        (?P<escaped>\\+["'])(?P<in_escaped>(?:(?!(?P=escaped)).)*)(?P=escaped)
        | (?P<quote>["'])(?P<in_quotes>(?:\\.|(?!(?P=quote))[^\\\n])*)(?P=quote)
        | \\*["'](?P<unfinished>[^\n]+)
    )
    | (?P<plain>[^\s"'\\&]+)
    """,
    re.VERBOSE,
)
_FLAG = re.compile(
    r"""(?<![\w-])--(?P<name>[A-Za-z][\w-]*)(?P<between>\\*["'],\s\\*["']|\s)(?P<value>[^\s"'\\-][^\s"'\\]*)"""
)
_BEARER = re.compile(
    r"\b(?P<scheme>bearer)\s+(?!(?:and|as|auth\w*|credentials?|error|for|format|header|in|is|of|or|scheme|tokens?|was)\b)"
    r"(?P<value>[\w.~+/=-]{4,})",
    re.IGNORECASE,
)
_BASIC = re.compile(r"(?P<scheme>\bauthorization\W{1,6}\w+)\s+(?P<value>[\w.~+/=-]{4,})", re.IGNORECASE)
_CONSTANTS = frozenset(("None", "null", "True", "true", "False", "false", "..."))
_NUMBER = re.compile(r"[-+]?\.?\d[\d_]*(?:\.\d*)?(?:e[-+]?\d+)?", re.IGNORECASE)
_CODE = re.compile(r"[A-Za-z_][\w.]*(?:\[|\(|\(.*\))[,:]?")
_SEEMS_SECRET = re.compile(r"(?=\D*\d)[^\s(\[{<]{6,}")


def redact(text: str) -> str:
    """Return a text in which credentials are replaced by ``***``.

    Credentials are:

    - in a URI, the user name and the password before the host, and the values of secret options, as in
      ``?name=value``;
    - the values of secret names elsewhere, as in ``HF_TOKEN=value``, ``token='value'``, ``"password": "value"`` and
      ``--api-key value``. Numbers, and what looks like code or prose, are kept;
    - the value after ``Bearer``, and in an ``Authorization`` header.

    A name is secret if it contains a word for a key, a token, a signature, a password or a credential. Only whole
    words count: ``api_key`` and ``accessToken`` are secret; ``tokenizer``, ``max_tokens`` and ``passed`` are not. In a
    URI, ``code`` and ``auth_code`` are secret too, and ``exit_code`` is not. Outside of URIs, ``key`` is not secret,
    but ``KEY`` is.
    """
    if "://" in text:
        text = _AFTER_SCHEME.sub(_redact_user_info, text)
    text = _OPTION.sub(_redact_option, text)
    text = _BASIC.sub(_redact_value, _BEARER.sub(_redact_value, text))
    return _FLAG.sub(_redact_flag, _redact_assignments(text))


def redact_strings(value: Any) -> Any:
    """Return a copy of nested dicts, lists and tuples in which :func:`redact` was applied to every string."""
    if isinstance(value, str):
        return redact(value)
    if isinstance(value, Mapping):
        return {name: redact_strings(each) for name, each in value.items()}
    return [redact_strings(each) for each in value] if isinstance(value, (list, tuple)) else value


def masked(value: Any) -> Any:
    """Return a copy of a configuration in which the values of secret names, and credentials in text, are ``***``.

    Mappings become dicts. They, lists and tuples are searched; other objects are kept. Numbers are masked only under
    names of passwords, because names such as ``num_key_value_heads`` are not secret.
    """
    return _map(value, lambda leaf: redact(leaf) if isinstance(leaf, str) else leaf, False, ())


def describe(value: Any) -> str:
    """Return the ``repr()`` of a configuration without its secrets; see :func:`masked`.

    If the ``repr()`` of one of its values raises an exception, the text names the type of the value instead.
    """
    return redact(repr(_map(value, _Shown, False, ())))


def as_text(value: Any) -> str:
    """Return the ``str()`` of a value of :func:`masked`, without secrets. It never raises."""
    return redact(_safe(str, value))


class _Shown:
    """Shows the ``repr()`` of any object."""

    def __init__(self, value: object) -> None:
        self._value = value

    def __repr__(self) -> str:
        return _safe(repr, self._value)


def _safe(convert: Callable[[Any], str], value: Any) -> str:
    try:
        return convert(value)
    except Exception as error:  # the methods of a user's class may raise any exception
        return f"<{type(value).__name__} object, whose {convert.__name__}() raised {type(error).__name__}>"


class MaskedOptions(dict[str, Any]):
    """Options whose ``repr()`` shows ``***`` instead of the values of secret options."""

    def __repr__(self) -> str:
        return describe(dict(self))

    def __reduce__(self) -> tuple[Any, ...]:
        return MaskedOptions, (dict(self),)


def _map(value: Any, leaf: Callable[[Any], Any], secret: bool, outer: tuple[int, ...]) -> Any:
    """Return a copy of nested containers.

    Args:
        value: the value.
        leaf: returns the copy of a value that is not a container.
        secret: True if the value has a secret name.
        outer: the ids of the containers around the value; one of them may contain itself.
    """
    if id(value) in outer:
        return "..."
    inside = (*outer, id(value))
    if isinstance(value, Mapping):
        try:
            items = list(value.items())
        except Exception:  # a user's mapping
            return leaf(value)
        return {
            name: _mask_number(name, each) or _map(each, leaf, secret or _is_secret_name(name), inside)
            for name, each in items
        }
    if type(value) in (list, tuple):
        return type(value)(_map(each, leaf, secret, inside) for each in value)
    is_kept = value is None or isinstance(value, (bool, int, float)) or (isinstance(value, (str, bytes)) and not value)
    return leaf(value) if not secret or is_kept else _MASK


def _mask_number(name: Any, value: Any) -> str | None:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return _MASK if is_number and isinstance(name, str) and _PASSWORD.search(name.lower()) else None


def _is_secret_name(name: Any) -> bool:
    """Return True if the values of a name are secret in a configuration."""
    return isinstance(name, str) and _has_secret_word(name)


def _redact_value(match: re.Match[str]) -> str:
    return f"{match['scheme']} {_MASK}"


def _redact_flag(match: re.Match[str]) -> str:
    """Redact ``--name value`` of a command line, or of the ``repr()`` of its list of arguments."""
    is_listed = match["between"].strip() != ""
    if not _has_secret_word(match["name"]) or not (is_listed or _SEEMS_SECRET.fullmatch(match["value"])):
        return match[0]
    return f"--{match['name']}{match['between']}{_MASK}"


def _redact_assignments(text: str) -> str:
    """Redact ``name=value`` and ``name: value``. The value of a name that is not secret may contain another one."""
    parts, end = [], 0
    for match in _ASSIGNMENT.finditer(text):
        value = _VALUE.match(text, match.end()) if match.start() >= end and _is_secret_in_text(match["name"]) else None
        if value is None:
            continue
        is_certain = match["separator"] == "=" or match["end"] != "" or match["name"].isupper()
        start, stop = _secret_part(value, match["name"], is_certain, is_quote_certain="=" in match["separator"])
        if start < stop:
            parts += [text[end:start], _MASK]
            end = stop
    return "".join([*parts, text[end:]])


def _is_secret_in_text(name: str) -> bool:
    is_other = name in ("key", "Key") or name.endswith(("Error", "Exception", "Warning"))
    return not is_other and _has_secret_word(name)


def _secret_part(value: re.Match[str], name: str, is_certain: bool, is_quote_certain: bool) -> tuple[int, int]:
    """Return the start and the end of the secret in a value; the same number twice if it contains none."""
    for group in ("in_escaped", "in_quotes", "unfinished"):
        if value[group] is not None:
            is_secret = is_certain or is_quote_certain or _SEEMS_SECRET.fullmatch(value[group])
            return value.span(group) if is_secret else (0, 0)
    plain = value["plain"].rstrip(",;)]}>.") or value["plain"]
    is_code = _CODE.fullmatch(value["plain"]) is not None or _CODE.fullmatch(value["plain"][:-1]) is not None
    is_literal = plain in (name, *_CONSTANTS) or _NUMBER.fullmatch(plain) is not None
    if is_code or is_literal or plain[0] in "<[({*" or not (is_certain or _SEEMS_SECRET.fullmatch(plain)):
        return 0, 0
    return value.start(), value.start() + len(plain)


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
    return address if at < 0 else f"{_MASK}{address[at:]}"


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
    return f"{separator}{name}={_MASK}" if _is_secret_option(unquote(name)) else match[0]


def _is_secret_option(name: str) -> bool:
    return [word.lower() for word in _WORD.findall(name)] in (["code"], ["auth", "code"]) or _has_secret_word(name)


def _has_secret_word(name: str) -> bool:
    words = [word.lower() for word in _WORD.findall(name)]
    joined = "".join(words)
    if _SPECIAL_TOKEN.search(joined):
        return False
    return any(_SECRET_WORD.fullmatch(word) for word in words) or _SECRET_PLURAL.search(joined) is not None
