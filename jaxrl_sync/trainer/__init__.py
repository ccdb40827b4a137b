"""The trainer: a sharded Flax NNX decoder, its losses, its update and its process.

Importing the room imports nothing else; name the module you need.
"""
