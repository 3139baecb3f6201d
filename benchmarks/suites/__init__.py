"""memhier in the suites of others: the modules that ann-benchmarks and big-ann-benchmarks load, and their data sets.

Neither suite is imported: adapters have every method that its runner calls, so that they load there unchanged and can
be tested here.
"""

__all__: list[str] = []
