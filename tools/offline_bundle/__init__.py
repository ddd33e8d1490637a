"""Builds the archive that brings SGLang and this plugin to a GPU host without network.

`make offline-bundle`; docs/offline.md says what is in it and how to use it.
"""
