"""Hides credentials in URIs before they are shown or written."""

from __future__ import annotations

import re

__all__ = ["redact"]


def redact(uri: str) -> str:
    """A URI without the credentials that may be in it."""
    uri = re.sub(r"://[^/@?]*@", "://***@", uri)
    return re.sub(r"([?&][^=&]*(?:key|secret|token|password|sig)[^=&]*=)[^&]*", r"\1***", uri, flags=re.IGNORECASE)
