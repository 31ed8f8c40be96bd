"""The composition root: opens a model, plans it, starts the engine's process and the front, joins them by rings, obeys signals.

start.py does what the engine waits for, with the few imports that takes; runner.py does the rest while the engine loads.
"""
