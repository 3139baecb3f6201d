"""Print a program that imports every public name, for a strict check of their types (``make pyright``)."""

import memhier
import memhier.ann
import memhier.recsys

if __name__ == "__main__":
    print("# pyright: strict")
    for package in (memhier, memhier.ann, memhier.recsys):
        print(f"from {package.__name__} import (")
        for name in package.__all__:
            print(f"    {name} as {package.__name__.rpartition('.')[2]}_{name},")
        print(")")
        print(*(f"print({package.__name__.rpartition('.')[2]}_{name})" for name in package.__all__), sep="\n")
