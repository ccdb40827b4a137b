"""Sparse payloads on the wire: positions, values, frames, and which coding costs least.

A delta of one flat buffer is (positions ascending, new bits, old bits); `frame` has the wire format.
"""
