"""A tiny recipe on the bundled digits for tests of recipes, papers and commands."""

TINY_RECIPE = """
version = 1
title = "Two methods on digits"
about = "Ten parties would be too many here."

[run]
rounds = 3
seeds = 2
points = 3

[parties]
population = "digits"
count = 4

[model]
net = "logistic"
inputs = 64
outputs = 10

[training]
lr = 0.1
steps = 4
participation = 3

[method]
algorithm = "fedgeomed+"
alpha = {start = 1.0, factor = 0.9}
rho = 0.1

[[methods]]
algorithm = "fedavg"

[[methods]]
algorithm = "fed+v1"
name = "RFA+"
alpha = 0.5
aggregate = {is = "GeometricMedian"}

[quick.run]
rounds = 1
"""
