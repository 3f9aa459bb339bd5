"""Files with tests of features that leave the package; they have the mark ``leaving``."""

LEAVING = set[str]()
