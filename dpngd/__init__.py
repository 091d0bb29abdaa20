"""DP-NGD: private natural-gradient descent, and the suite that reproduces its paper."""

__version__ = "0.1.0"
