"""Linnet: a model's architecture written once, run and exported everywhere.

``linnet.load`` gives a model that generates; ``linnet.NAME.export`` reaches the exporter NAME of
any installed plugin. Importing ``linnet`` imports no framework.
"""

__version__ = "0.1.0"
