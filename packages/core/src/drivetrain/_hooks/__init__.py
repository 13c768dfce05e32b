"""The classes that plugins implement or receive, and the discovery and loading of plugins."""
