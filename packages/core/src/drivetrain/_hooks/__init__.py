"""The classes that plugins implement or receive, and how plugins are found and loaded."""
