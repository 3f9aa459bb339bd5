"""Files with tests of features that leave the package; they have the mark ``leaving``."""

LEAVING = {"test_several_optimizers.py"}
