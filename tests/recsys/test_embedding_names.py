"""The names of memhier.recsys, as completion in a shell shows them."""

import memhier
from memhier import recsys


def test_dir_shows_every_public_name() -> None:
    assert set(dir(recsys)) >= {*recsys.__all__, "__all__", "__doc__"}
    assert recsys.Lookahead is not memhier.Lookahead
    for name in recsys.__all__:
        assert getattr(recsys, name).__module__.startswith("memhier.recsys.")
