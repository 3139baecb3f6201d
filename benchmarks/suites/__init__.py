"""memhier in the suites of others: what ann-benchmarks and big-ann-benchmarks load, and their data sets read here.

Neither suite is imported: adapters have every method that its runner calls, so that they load there unchanged and can
be tested here.
"""

__all__: list[str] = []
