"""The compiled core of memhier. Use it through :mod:`memhier`, which falls back to Python without it."""
