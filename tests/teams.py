"""Files of teams that take part from machines of their own, and how they learn: the same for letters and for Flower."""

from __future__ import annotations

TEAM = """
from problems import classes, network

def model():
    return network()

def data():
    party = classes(5)[{name!r}]
    return party.x, party.y, party.x[:3], party.y[:3]
"""
LEARNING = """
[model]
net = "problems:network"
[work]
lr = 0.05
epochs = 1
batch = 4
optimizer = "Adam"
[method]
algorithm = "{method}"
"""
