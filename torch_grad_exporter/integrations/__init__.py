"""One file for each framework, imported by name alone.

They share `session.py`, `common.py` and `engines.py`. `attach.py`, with `roots.py`, serves programs that know nothing of the
exporter.
"""
