"""Step times of published training runs: what a recipe asks for, predicted by a fitted schedule.

A *recipe* is a model, a slice, a mesh and a rematerialisation policy as people publish them. Its
step is a schedule of matrix products, attention, traffic to memory and collectives, with a few
constants that are shared over all recipes and fitted to published runs (``points.csv``).
"""
