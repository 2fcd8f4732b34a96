"""Comparisons of several federations: methods and seeds side by side, coalitions of parties, recorded runs, reports.

Border to :mod:`descant.analysis`: a module belongs here if it trains federations to compare them, or summarizes, stores
or reports such results. Measurements of a single federation, and pure mathematics such as Shapley values, belong to
``analysis``, which never imports ``studies``.
"""
