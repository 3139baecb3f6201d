"""The ``memhier`` command."""
